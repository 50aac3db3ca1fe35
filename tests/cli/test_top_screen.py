"""What ``pdserve top`` draws: it fits the screen, and nothing in it commands the terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cli.watch.top import ScreenSize, amount, duration, render
from pdserve.wire.cache_groups import Keep
from pdserve.wire.status import Incident, IncidentKind, RequestStage, RequestView
from pdserve_proxy.status.report import GroupStatus, Latencies, NodeStatus, Rates, StatusReport
from pdserve_proxy.status.throughput import Percentiles
from tests.examples import examples

URL = "http://127.0.0.1:8000"
ESCAPES = re.compile(r"\x1b\[\d+m")
ANYTHING = st.text(max_size=60)


def node(name: str, **changes: object) -> NodeStatus:
    fields = {
        "boot_id": "00", "name": name, "role": "decode", "state": "serving", "model": "m", "url": "http://10.0.0.1:1",
        "version": "0.1.0", "protocol": 6, "kernels": "", "running": 3, "waiting": 1, "max_running": 32,
        "kv_used": 0.5, "queue_s": 0.0, "step_s": 0.031, "heartbeat_age_s": 0.1, "links": {"shared_memory": 2},
        "prompt_tokens_per_s": None, "generated_tokens_per_s": 123.4,
    }  # fmt: skip
    return NodeStatus(**{**fields, **changes})  # type: ignore[arg-type]


def report(
    nodes: tuple[NodeStatus, ...] = (), under_way: tuple[RequestView, ...] = (), incidents: tuple[Incident, ...] = ()
) -> StatusReport:
    return StatusReport(
        version="0.1.0",
        unix_s=1_700_000_000.0,
        now_s=100.0,
        uptime_s=4000.0,
        workers=2,
        heartbeat_s=1.0,
        nodes=nodes,
        nodes_left_out=0,
        stages={RequestStage.ANSWER: len(under_way)} if under_way else {},
        under_way=under_way,
        under_way_left_out=0,
        ended=(),
        outcomes={},
        rates=Rates(requests_per_s=1.5, failures_per_s=0.0, prompt_tokens_per_s=None, generated_tokens_per_s=1234.5),
        latencies=Latencies(ttft=Percentiles(0.25, 1.5, 130.0), itl=Percentiles(), e2e=Percentiles()),
        incidents=incidents,
    )


def request(name: str = "r1") -> RequestView:
    return RequestView(name, "/v1/completions", 92.5, stage=RequestStage.ANSWER, decode="decode-0", prefill="prefill-0")


@pytest.mark.parametrize("number", [5, 12, 13, 100])
def test_what_happened_has_room_beside_any_number_of_nodes(number: int) -> None:
    incidents = tuple(Incident(IncidentKind.NODE_LOST, 90.0 + n, f"gone {n}") for n in range(5))
    nodes = tuple(node(f"n{n}") for n in range(number))
    lines = render(report(nodes, (request(),), incidents), ScreenSize(80, 24, False), URL)
    assert len(lines) <= 24
    assert [n for n in range(5) if any(f"gone {n}" in line for line in lines)][-3:] == [2, 3, 4]
    shown = sum(line.startswith("n") and "decode" in line for line in lines)
    assert shown == number or f"{number - shown} more" in lines
    assert shown >= min(number, 6)


def test_everything_is_there() -> None:
    incidents = (
        Incident(IncidentKind.NODE_JOINED, 50.0, "a decode node of m", "decode-0"),
        Incident(IncidentKind.RESUMED, 90.0, "its answer goes on at decode-0", "decode-1", "r9", 6),
    )
    lines = render(report((node("decode-0"),), (request(),), incidents), ScreenSize(160, None, colour=False), URL)
    text = "\n".join(lines)
    assert lines[0].startswith("pdserve 0.1.0 · up 67 min · 2 workers · http://127.0.0.1:8000 · ")
    assert "requests 1.5/s   failures 0.0/s   tokens 1,234/s   prompt tokens –/s" in lines
    assert re.search(r"time to first token +250 ms +1\.50 s +2 min", text)
    assert re.search(
        r"decode-0 +decode +serving +3/32 +1 +█████░░░░░  50% +123 +– +– +31 ms +2 shared memory +0\.1\.0", text
    )
    assert re.search(r"r1 +answer +prefill-0 → decode-0 +7\.50 s", text)
    assert text.index("its answer goes on at decode-0 × 6 · r9") < text.index("a decode node of m")


WINDOW_GROUPS = (
    GroupStatus(name="whole contexts", keep=Keep.ALL, window=0, used_blocks=30, num_blocks=120, block_bytes=2**18),
    GroupStatus(name="window 128", keep=Keep.WINDOW, window=128, used_blocks=9, num_blocks=10, block_bytes=2**19),
    GroupStatus(name="state", keep=Keep.LATEST, window=0, used_blocks=2, num_blocks=8, block_bytes=2**20),
)


def test_a_node_that_drafts_shows_the_share_of_its_tokens_that_drafts_gave() -> None:
    nodes = (node("drafting", generated_tokens_per_s=200.0, accepted_drafts_per_s=90.0), node("plain"))
    lines = render(report(nodes), ScreenSize(200, None, False), URL)
    shown = {line.split()[0]: line for line in lines if line.split()[:1] in (["NODE"], ["drafting"], ["plain"])}
    assert re.search(r"TOK/S +DRAFTS +PROMPT/S", shown["NODE"])
    assert re.search(r" 200 +45% ", shown["drafting"])
    assert re.search(r" 123 +– ", shown["plain"])


def test_groups_of_a_cache_are_below_the_nodes_if_a_node_has_several() -> None:
    screen = ScreenSize(160, None, colour=False)
    text = "\n".join(render(report((node("d", cache_groups=WINDOW_GROUPS), node("e"))), screen, URL))
    assert re.search(r"d +whole contexts +every block +██░░░░░░░░  25% +30/120 +7\.5/30\.0", text)
    assert re.search(r"d +window 128 +last 128 tokens +█████████░  90% +9/10 +4\.5/5\.0", text)
    assert re.search(r"d +state +latest state +██░░░░░░░░  25% +2/8 +2\.0/8\.0", text)
    assert "GROUP" not in "\n".join(render(report((node("d"),)), screen, URL))


@pytest.mark.parametrize("height", range(16, 30))
def test_groups_that_do_not_fit_are_counted(height: int) -> None:
    nodes = tuple(node(f"n{number}", cache_groups=WINDOW_GROUPS) for number in range(3))
    incidents = (Incident(IncidentKind.NODE_LOST, 90.0, "gone"),)
    lines = render(report(nodes, (), incidents), ScreenSize(100, height, colour=False), URL)
    assert len(lines) <= height
    shown = sum(bool(re.search("every block|last 128|latest state", line)) for line in lines)
    assert f"{9 - shown} more" in lines or shown in (0, 9)
    assert any("gone" in line for line in lines)


def test_a_full_cluster_leaves_room_for_what_happened() -> None:
    incidents = tuple(Incident(IncidentKind.NODE_LOST, float(at), f"loss {at}", "d") for at in range(50))
    full = report((node("a"), node("b")), tuple(request(f"r{number}") for number in range(40)), incidents)
    lines = render(full, ScreenSize(100, 40, colour=False), URL)
    assert len(lines) == 40
    assert "loss 49" in "\n".join(lines)
    assert any(line.endswith(" more") for line in lines)


@settings(max_examples=examples(60))
@given(ANYTHING, ANYTHING, ANYTHING, st.integers(1, 200), st.integers(1, 60), st.booleans())
def test_nothing_is_wider_or_higher_than_the_screen_or_commands_it(
    name: str, text: str, identity: str, width: int, height: int, colour: bool
) -> None:
    shown = report(
        (node(name, version=text, links={text: 1}),),
        (request(identity),),
        (Incident(IncidentKind.REQUEST_FAILED, 1.0, text, name, identity),),
    )
    lines = render(shown, ScreenSize(width, height, colour=colour), URL, note="no answer")
    assert 1 <= len(lines) <= height
    for line in lines:
        bare = ESCAPES.sub("", line) if colour else line
        assert bare.isprintable()
        assert len(bare) <= max(width, 20)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "–"), (0.0, "0 ms"), (0.0342, "34.2 ms"), (0.412, "412 ms"), (5.3, "5.30 s"), (61.0, "61.0 s"),
     (600, "10 min"), (9000, "2 h"), (400_000, "5 days")],
)  # fmt: skip
def test_durations(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_amounts() -> None:
    assert [amount(value) for value in (None, 0.0, 99.94, 1234567.8)] == ["–", "0.0", "99.9", "1,234,568"]
