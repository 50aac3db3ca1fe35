"""The simulation of many nodes adds up, does the same for the same seed, and shows what it is asked."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from lab.scale.page import policies
from lab.simulation.scale.cluster import Plan, Report, Scale
from lab.simulation.scale.events import Events
from lab.simulation.scale.figures import Run, add, read
from lab.simulation.scale.measured import REPORTS, measured_profile
from lab.simulation.scale.nodes import DecodeModel, PrefillModel
from lab.simulation.scale.proxy import CoarseProxy, RealCosts
from pdserve.bench.report import read_report
from pdserve.config import RelayConfig, RoutingPolicy
from tests.plan.profiles import CACHE, PARTS, profile_of

SMALL = Plan(nodes=12, proxies=2, streams=60, prompt_tokens=64, answer_tokens=100, warm_up_s=6.0, seconds=14.0)


def figures(report: Report) -> dict[str, object]:
    """Returns what is virtual of a report."""
    return {name: value for name, value in asdict(report).items() if name != "costs"}


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    plan = replace(SMALL, lose=0.25)
    first, again, other = (Scale(replace(plan, seed=seed), profile_of()).run() for seed in (1, 1, 2))
    assert figures(first) == figures(again)
    assert figures(first) != figures(other)


@pytest.mark.parametrize("policy", RoutingPolicy)
@pytest.mark.parametrize("lose", [0.0, 0.25])
def test_every_stream_has_one_attempt_or_waits_for_its_turn(policy: RoutingPolicy, lose: float) -> None:
    scale = Scale(replace(SMALL, policy=policy, lose=lose, max_resumes=64), profile_of())
    report = scale.run()
    waiting = sum(proxy.waiting for proxy in scale.proxies)
    decode = [node for node in scale.nodes if isinstance(node, DecodeModel)]
    under_way = sum(proxy.attempts.under_way(node.info.boot_id) for proxy in scale.proxies for node in decode)
    assert under_way + waiting == SMALL.streams
    assert report.answers > 0
    if report.loss is not None:
        assert report.loss.nodes == 3
        assert report.loss.noticed_s == 3.0
        assert 0 < report.loss.resumed <= SMALL.streams
        dead = [node.info.boot_id for node in decode if not node.alive]
        assert dead
        assert not any(proxy._at.get(boot_id) for proxy in scale.proxies for boot_id in dead)
        assert not any(proxy.attempts.under_way(boot_id) for proxy in scale.proxies for boot_id in dead)


def test_two_choices_are_more_even_than_turns() -> None:
    turns, two = (
        Scale(replace(SMALL, policy=policy, streams=120), profile_of()).run()
        for policy in (RoutingPolicy.ROUND_ROBIN, RoutingPolicy.TWO_CHOICES)
    )
    assert two.decode_imbalance is not None
    assert turns.decode_imbalance is not None
    assert two.decode_imbalance < turns.decode_imbalance


def test_more_resumes_at_once_end_the_pause_sooner() -> None:
    few, many = (
        Scale(replace(SMALL, lose=0.25, streams=120, max_resumes=most), profile_of()).run().loss for most in (1, 64)
    )
    assert few is not None
    assert many is not None
    (_, few_p99), (_, many_p99) = few.pause_s, many.pause_s
    assert few_p99 is not None
    assert many_p99 is not None
    assert many_p99 < few_p99


def test_a_run_too_short_to_see_anything_is_kept_and_shown_with_dashes(tmp_path: Path) -> None:
    plan = replace(SMALL, warm_up_s=0.5, seconds=0.5, lose=0.25, answer_tokens=10_000)
    file = tmp_path / "figures.json"
    add(file, Run(plan, Scale(plan, profile_of()).run(), 0.0))
    kept = read(file)
    assert kept.runs[0].report.gap_s == (None, None)
    assert "| time between tokens p50, p99 | – |" in policies(kept)


def test_answers_end_when_step_by_step_they_would() -> None:
    events = Events()
    ends: list[tuple[str, float]] = []
    node = DecodeModel(0, events, profile_of().speed(1), CACHE)
    alone_s, both_s = PARTS.step_s(1, 0, 0), PARTS.step_s(2, 0, 0)

    def begin(name: str, tokens: int) -> None:
        node.expect()
        node.answer(16, tokens, lambda: ends.append((name, events.now)))

    begin("one", 10)
    events.at(2 * alone_s, lambda: begin("two", 4))
    events.run_until(10.0)
    two_s = 2 * alone_s + 4 * both_s
    assert [name for name, _ in ends] == ["two", "one"]
    assert [at_s for _, at_s in ends] == pytest.approx([two_s, two_s + 4 * alone_s])


def test_a_full_batch_has_the_others_wait() -> None:
    events, ends = Events(), []
    node = DecodeModel(0, events, profile_of().speed(1), msgspec.structs.replace(CACHE, max_num_seqs=1))
    for _ in range(2):
        node.expect()
        node.answer(1, 5, lambda: ends.append(events.now))
    assert (node.running, node.waiting) == (1, 1)
    events.run_until(10.0)
    assert ends == pytest.approx([5 * PARTS.step_s(1, 0, 0), 10 * PARTS.step_s(1, 0, 0)])


def test_a_dead_node_ends_nothing() -> None:
    events, ends = Events(), []
    node = PrefillModel(0, events, profile_of().speed(1), CACHE)
    for _ in range(2):
        node.compute(100, lambda: ends.append(events.now))
    events.run_until(node.prompt_s(100))
    node.die()
    events.run_until(10.0)
    assert len(ends) == 1


def test_streams_of_a_lost_node_go_on_so_many_at_a_time() -> None:
    events = Events()
    proxy = CoarseProxy(events, RoutingPolicy.ROUND_ROBIN, None, RelayConfig(max_resumes=2), RealCosts())
    began: list[int] = []
    for number in range(5):
        proxy.take_turn(lambda number=number: began.append(number))  # type: ignore[misc]
    events.run_until(0.1)
    assert began == [0, 1]
    proxy.end_turn()
    events.run_until(0.2)
    assert began == [0, 1, 2]


def test_the_measured_profile_explains_what_was_measured() -> None:
    steps = measured_profile(64).speed(1).steps
    for row in read_report(REPORTS / "engine-cpu.json").rows:
        if row.what == "decode step":
            batch, context = int(row.at["batch"]), int(row.at["context"])
            assert steps.step_s(batch, batch * context, 0) == pytest.approx(
                row.figure("and choice").value / 1e3, rel=0.2
            )
        elif row.what == "prefill step":
            chunk = int(row.at["chunk"])
            assert steps.step_s(0, 0, chunk, chunk / 2) == pytest.approx(row.figure("step").value / 1e3, rel=0.05)
