"""Takes docs/status-page.png of a real cluster under load: ``python -m lab.status_page_screenshot``.

It takes two minutes. A decode node is killed on the way, so that the page has something to tell.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
from pathlib import Path

import aiohttp

from tests.chromium import Page, chromium_page
from tests.processes import Process, pdserve

FILE = Path(__file__).parents[1] / "docs" / "status-page.png"
CLIENTS = 6
LOAD_S = 34.0
"""The page shows 30 seconds."""
KILL_AFTER_S = 20.0
MAX_BYTES = 160_000
QUESTION = "Write a short story about a lighthouse keeper who finds a strange machine on the beach. "
_URL = re.compile(r"API: (http://127\.0\.0\.1:\d+)/v1")


def main() -> None:
    with pdserve("up", "--model", "demo", "--prefill", "1", "--decode", "2", "--port", "0") as cluster:
        found = _URL.search(cluster.wait_for(_URL.search))
        assert found is not None
        picture = asyncio.run(_take(found[1], cluster))
        cluster.terminate()
        cluster.wait(60)
    assert len(picture) < MAX_BYTES, f"{len(picture)} bytes"
    FILE.write_bytes(picture)
    print(f"{FILE}: {len(picture)} bytes")


async def _take(url: str, cluster: Process) -> bytes:
    await _ready(url)
    async with aiohttp.ClientSession(url) as http, chromium_page() as page:
        await page.size(1240, 900)
        await page.goto(url)
        await page.until("document.querySelector('#connection').className === 'live'")
        numbers = itertools.count(1)
        clients = [asyncio.create_task(_ask(http, random.Random(seed), numbers)) for seed in range(CLIENTS)]
        await asyncio.sleep(KILL_AFTER_S)
        os.kill(_pid_of("decode-1", cluster.pid), signal.SIGKILL)
        await asyncio.sleep(LOAD_S - KILL_AFTER_S)
        picture = await _whole_page(page)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return picture


async def _ready(url: str) -> None:
    async with asyncio.timeout(300), aiohttp.ClientSession(url) as http:
        while True:
            async with http.get("/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.5)


async def _ask(http: aiohttp.ClientSession, chance: random.Random, numbers: itertools.count[int]) -> None:
    """Asks one question after the other, each of its own length."""
    async with http.get("/v1/models") as response:
        model = (await response.json())["data"][0]["id"]
    while True:
        await asyncio.sleep(chance.uniform(0.1, 1.5))
        content = f"{next(numbers)}. {QUESTION * chance.randint(1, 12)}"
        body = {
            "model": model,
            "stream": True,
            "max_tokens": chance.randint(20, 160),
            "messages": [{"role": "user", "content": content}],
        }
        async with http.post("/v1/chat/completions", json=body) as response:
            await response.read()


def _pid_of(name: str, ancestor: int) -> int:
    """Returns the process of the node ``name`` in the process group of the cluster."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == ancestor and name.encode() in words:
            return int(folder.name)
    raise AssertionError(f"{name} does not run")


async def _whole_page(page: Page) -> bytes:
    height = await page.evaluate("document.documentElement.scrollHeight")
    await page.size(1240, min(int(height), 1300))
    await page.until("document.querySelector('#connection').className === 'live'")
    return await page.screenshot()


if __name__ == "__main__":
    main()
