"""The status page in Chromium: what people see, do and type, in light and dark, on narrow and wide screens."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import pytest

from pdserve.config import AdmissionConfig, StatusConfig
from pdserve.wire.cache_groups import Keep
from pdserve.wire.command import SetRole
from pdserve.wire.discovery import GroupCapacity, NodeLoad, Role
from tests.chromium import Page, chromium_page
from tests.proxy.cluster import Cluster, cluster, eventually, node_info, proxy_config
from tests.proxy.fake_node import DONE, EVENTS, Exchange, FakeNode, stream_events
from tests.proxy.status.test_status_routes import ADMIN_KEY, CommandedNode, report_of

pytestmark = pytest.mark.integration

KEY = "a-key-of-a-client"
MARKUP = "<img src=x onerror=document.title='broken'>"
LIVE = "document.querySelector('#connection').className === 'live'"
BAR = "document.querySelector('#timeline [role=button]')"
TEXT = "document.body.innerText"

CONTRASTS = """
(() => {
  const lights = (colour) => colour.match(/[0-9.]+/g).slice(0, 3).map((one) => {
    const part = one / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const light = (colour) => lights(colour).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    const own = getComputedStyle(element).backgroundColor;
    return own === 'rgba(0, 0, 0, 0)' ? ground(element.parentElement) : own;
  };
  const poor = [];
  for (const element of document.querySelectorAll('h1, h2, p, th, td, span, button, li, time')) {
    if (!element.textContent.trim() || !element.checkVisibility() || element.children.length) continue;
    const [one, other] = [light(getComputedStyle(element).color), light(ground(element))].sort((a, b) => b - a);
    if ((one + 0.05) / (other + 0.05) < 4.5) poor.push(element.outerHTML);
  }
  return poor;
})()
"""
"""The elements whose text stands out too little from its ground: less than 4.5 to 1, as WCAG asks for."""


DANGLING = """
[...document.querySelectorAll('.parts')].filter((whole) => whole.checkVisibility()).flatMap((whole) => {
  const left = whole.getBoundingClientRect().left;
  const clips = getComputedStyle(whole).overflowX === 'hidden';
  const tops = new Set();
  return [...whole.children].filter((part) => {
    const box = part.getBoundingClientRect();
    const first = !tops.has(box.top);
    tops.add(box.top);
    return part.textContent.includes('·') || (first && (!clips || box.left > left + 0.5));
  }).map((part) => part.outerHTML);
})
"""
"""The parts that begin a line, and whose dot shows there all the same."""


async def see(page: Page, text: str) -> None:
    await page.until(f"{TEXT}.includes({msgspec.json.encode(text).decode()})")


async def type_key(page: Page, key: str) -> None:
    await page.until("document.querySelector('#key-dialog').open")
    await page.evaluate("document.querySelector('#key-input').focus()")
    await page.write(key)
    # A browser may tell only now that the dialog was closed before: what is typed stays.
    await page.evaluate("document.querySelector('#key-dialog').dispatchEvent(new Event('close'))")
    await page.press("Enter", "\r")


async def test_the_page_shows_a_stream_and_commands_a_node(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def half(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(EVENTS[0])
        await go_on.wait()
        await exchange.chunk(DONE)
        await exchange.finish()

    admins = tmp_path / "admins"
    admins.write_text(f"ada {ADMIN_KEY}\n")
    config = dataclasses.replace(proxy_config(), status=StatusConfig(admin_key_file=str(admins)))
    node = CommandedNode()
    async with chromium_page() as page, FakeNode(half) as server, node.serving() as info:
        async with cluster(config) as running:
            await running.add(node_info(MARKUP, Role.MIXED, server.url))
            await page.size(1280, 900)
            await page.goto(running.addresses.url)
            await page.until(LIVE)
            await see(page, MARKUP)
            large = "[...document.querySelectorAll('#ttft .value, #itl .value, #e2e .value')]"
            assert await page.evaluate(f"{large}.every((value) => value.innerText.endsWith('median'))")
            assert not await page.evaluate("document.querySelector('#nodes button') !== null"), "no key, no commands"
            asking = asyncio.create_task(_chat(running))
            await page.until(f"{BAR} !== null && {BAR}.querySelector('.answer').getAttribute('width') > 0")
            await _look_at_all_sizes(page)
            await _open_and_close_a_request(page)
            go_on.set()
            await asking
            await running.add(info)
            await _command(page, node)
        await page.until("document.querySelector('#connection').innerText.startsWith('No answer since')")
        assert await page.evaluate("document.title") == "pdserve"
        assert [one for one in page.complaints if "ERR_CONNECTION_REFUSED" not in one] == []


async def _chat(running: Cluster) -> None:
    body = {"model": "m", "stream": True}
    async with running.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"}) as response:
        await response.read()


async def _look_at_all_sizes(page: Page) -> None:
    grounds = set()
    for width in (360, 390, 768, 1110, 1600):
        for dark in (False, True):
            await page.size(width, 900, dark=dark)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{width} px scrolls"
            assert await page.evaluate(CONTRASTS) == []
            assert await page.evaluate(DANGLING) == []
            assert not [line for line in (await page.evaluate(TEXT)).splitlines() if line.strip().endswith("·")]
            grounds.add(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
            shown = await page.screenshot()
            assert shown.startswith(b"\x89PNG")
    assert len(grounds) == 2
    await page.size(1280, 900)


async def _open_and_close_a_request(page: Page) -> None:
    await page.evaluate(f"{BAR}.focus()")
    await page.press("Enter", "\r")
    await page.until("document.querySelector('#request-dialog').open")
    await see(page, "mine")
    await page.until("!document.querySelector('#request-picture').hidden")  # the proxy's own part at least
    assert await page.evaluate("document.querySelectorAll('#request-timeline rect').length") > 0
    await page.press("Escape")
    await page.until("!document.querySelector('#request-dialog').open")
    assert await page.evaluate(f"document.activeElement === {BAR}"), "the focus returns"


async def _command(page: Page, node: CommandedNode) -> None:
    await page.evaluate("document.querySelector('#key').click()")
    await type_key(page, ADMIN_KEY)
    button = "document.querySelector('[aria-label=\"Command d\"]')"
    await page.until(f"{button} !== null")
    await page.evaluate(f"{button}.click()")
    await page.evaluate("[...document.querySelectorAll('#node-choices button')][0].click()")
    await see(page, "It is a prefill node now.")
    assert node.commands == [SetRole(Role.PREFILL)]
    await page.press("Escape")
    await see(page, "ada has had it become a prefill node")


async def test_where_there_are_keys_the_page_asks_for_one_and_keeps_it_in_its_tab() -> None:
    config = dataclasses.replace(proxy_config(), admission=AdmissionConfig(api_keys=(KEY,)))
    async with chromium_page() as page, cluster(config) as running:
        await running.add(node_info("decode-7", Role.MIXED))
        await page.goto(running.addresses.url)
        await see(page, "those with a key")
        assert "decode-7" not in await page.evaluate(TEXT)
        await page.press("Escape")
        await page.until("!document.querySelector('#key-dialog').open")
        words = await page.evaluate(TEXT)
        assert "This page is locked" in words
        assert "--admin-key-file" in words
        assert "Time to first token" not in words, "an empty frame tells a person nothing"
        assert await page.evaluate(CONTRASTS) == []
        await page.evaluate("document.querySelector('#locked-unlock').click()")
        await type_key(page, "a-wrong-key-of-nobody")
        await see(page, "does not accept this key")
        await type_key(page, KEY)
        await page.until(LIVE)
        await see(page, "decode-7")
        assert "This page is locked" not in await page.evaluate(TEXT)
        kept = await page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert kept == [0, 1, "", f"{running.addresses.url}/"]
        await page.goto(running.addresses.url)  # another load of the same tab
        await page.until(LIVE)


async def test_the_sparklines_begin_with_what_was_before_the_page_was_opened() -> None:
    async with chromium_page() as page, FakeNode(stream_events) as server, cluster() as running:
        await running.add(node_info("n", Role.MIXED, server.url))
        await _chat(running)

        async def has_history() -> bool:
            return sum((await report_of(running)).history.requests_per_s) > 0

        await eventually(has_history, "the end of the step of 5 s in which the request ended")
        await page.goto(running.addresses.url)
        await page.until(LIVE)
        path = await page.evaluate("document.querySelector('#requests .spark path').getAttribute('d')")
        heights = [float(point.split(",")[1]) for point in path.removeprefix("M").split("L")]
        assert len(heights) > 1
        assert min(heights[:-1]) < 22.0, "a request of before is in it"


GROUPS = (
    GroupCapacity("whole contexts", Keep.ALL, 400, 2**18),
    GroupCapacity("window 128", Keep.WINDOW, 20, 2**19, 128),
    GroupCapacity("state", Keep.LATEST, 8, 2**20),
)
CELLS = "[...document.querySelectorAll('#groups tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"


async def test_the_page_shows_the_groups_of_a_cache_that_has_several() -> None:
    one = node_info("llama", Role.MIXED)
    hybrid = node_info("hybrid", Role.MIXED)
    capacity = msgspec.structs.replace(hybrid.capacity, num_blocks=400, groups=GROUPS)
    async with chromium_page() as page, cluster() as running:
        await running.add(one, load=NodeLoad(running=1, free_blocks=8))
        await page.size(1280, 900)
        await page.goto(running.addresses.url)
        await see(page, "50 %")
        assert not await page.evaluate("document.querySelector('#groups').checkVisibility()"), "it has one group"
        load = NodeLoad(running=1, free_blocks=300, bounded_free_blocks=(1, 6))
        await running.add(msgspec.structs.replace(hybrid, capacity=capacity), load=load)
        await see(page, "window 128")
        await see(page, "95 %")
        assert await page.evaluate(CELLS) == [
            ["hybrid", "whole contexts", "every block", "100 / 400", "25.0 / 100 MiB"],
            ["hybrid", "window 128", "what the last 128 tokens touch", "19 / 20", "9.5 / 10.0 MiB"],
            ["hybrid", "state", "the state after all tokens", "2 / 8", "2.0 / 8.0 MiB"],
        ]
        await _look_at_all_sizes(page)
        assert page.complaints == []


async def test_the_report_has_the_groups_and_how_full_the_fullest_is() -> None:
    hybrid = node_info("hybrid", Role.MIXED)
    capacity = msgspec.structs.replace(hybrid.capacity, num_blocks=400, groups=GROUPS)
    async with cluster() as running:
        load = NodeLoad(running=1, free_blocks=300, bounded_free_blocks=(1, 6))
        await running.add(msgspec.structs.replace(hybrid, capacity=capacity), load=load)

        async def heard() -> bool:
            return (await report_of(running)).nodes[0].kv_used is not None

        await eventually(heard, "a heartbeat")
        (node,) = (await report_of(running)).nodes
        assert node.kv_used == pytest.approx(0.95)
        assert [(group.keep, group.used_blocks, group.num_blocks) for group in node.cache_groups] == [
            (Keep.ALL, 100, 400),
            (Keep.WINDOW, 19, 20),
            (Keep.LATEST, 2, 8),
        ]
