"""Tests the loads that predictions are made for."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest

from pdserve.errors import PlanError
from pdserve.plan.load import Lengths, PlannedRequest, observed_load, poisson_load, rate_of, read_lengths, read_trace


def test_requests_come_at_the_rate_and_with_the_lengths_that_were_asked_for() -> None:
    prompts, outputs = read_lengths("16-512"), read_lengths("64:3,1024-4096:1")
    load = poisson_load(5.0, 4000, prompts, outputs, seed=1)
    assert load == poisson_load(5.0, 4000, prompts, outputs, seed=1)
    assert load != poisson_load(5.0, 4000, prompts, outputs, seed=2)
    assert rate_of(load) == pytest.approx(5.0, rel=0.05)
    assert statistics.fmean(request.prompt_tokens for request in load) == pytest.approx(prompts.mean, rel=0.05)
    assert statistics.fmean(request.output_tokens for request in load) == pytest.approx(outputs.mean, rel=0.1)
    assert {request.output_tokens < 1024 for request in load} == {True, False}
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(load)]
    # A Poisson process: the gaps vary as much as they are long.
    assert statistics.pstdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.1)


@pytest.mark.parametrize("text", ["", "0", "-5", "64-16", "lots", "64:x", "64:0", "1-99999999999", "64:inf"])
def test_lengths_that_nobody_can_have_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="length"):
        read_lengths(text)


def test_a_trace_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_s": 2, "prompt_tokens": 10, "output_tokens": 5}\n\n'
        '{"at_s": 0.5, "prompt_tokens": 3, "output_tokens": 1}\n'
    )
    assert read_trace(path) == [PlannedRequest(0.5, 3, 1), PlannedRequest(2.0, 10, 5)]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no request"),
        ('{"at_s": 0}\n', "line 1: .*missing.*right is such as"),
        ('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n[]\n', "line 2"),
        ('{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}\n', "line 1"),
        ('{"at_s": 0, "prompt_tokens": 0, "output_tokens": 1}\n', "line 1"),
        ('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1, "more": 1}\n', "more"),
        ('{"at_s": NaN, "prompt_tokens": 1, "output_tokens": 1}\n', "line 1"),
    ],
)
def test_a_bad_line_of_a_trace_is_named_with_a_good_one(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(PlanError, match=wrong):
        read_trace(path)


def test_a_trace_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the trace"):
        read_trace(tmp_path / "absent.jsonl")


def _metrics(prefix: str, prompts: dict[str, int], outputs: dict[str, int]) -> str:
    lines = []
    for name, buckets in (("request_prompt_tokens", prompts), ("request_generation_tokens", outputs)):
        lines.append(f"# TYPE {prefix}{name} histogram")
        lines += [f'{prefix}{name}_bucket{{le="{bound}"}} {count}' for bound, count in buckets.items()]
        lines.append(f"{prefix}{name}_count {max(buckets.values())}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("prefix", ["pdserve_", "vllm:"])
def test_a_running_cluster_tells_its_rate_and_lengths_between_two_looks(prefix: str) -> None:
    before = [_metrics(prefix, {"100": 50, "200": 50, "+Inf": 50}, {"64": 50, "+Inf": 50})] * 2
    after = [_metrics(prefix, {"100": 50, "200": 80, "+Inf": 80}, {"64": 80, "+Inf": 80})] * 2
    seen = observed_load(before, after, 20.0)
    assert seen.rate == pytest.approx(3.0)
    assert seen.requests == 60
    assert seen.prompts == Lengths(((101, 200),), (1.0,))
    assert seen.outputs == Lengths(((1, 64),), (1.0,))
    assert 101 <= seen.prompts.draw(random.Random(1)) <= 200


def test_a_node_that_tells_its_histograms_under_both_names_is_counted_once() -> None:
    before, after = (
        "".join(_metrics(prefix, {"100": count, "+Inf": count}, {"64": count, "+Inf": count}) for prefix in both)
        for both, count in ((("pdserve_", "vllm:"), 50), (("pdserve_", "vllm:"), 80))
    )
    assert observed_load([before], [after], 10.0).requests == 30


def test_a_node_that_has_started_anew_takes_nothing_from_the_others() -> None:
    before, after = (
        [_metrics("pdserve_", {"100": count, "+Inf": count}, {"64": count, "+Inf": count}) for count in counts]
        for counts in ((1000, 500), (10, 600))
    )
    assert observed_load(before, after, 10.0).requests == 110


@pytest.mark.parametrize("text", ["404: Not Found", "<html>x</html>", '{"error": "no key"}', 'x{le="1"} abc'])
def test_what_is_not_in_the_format_of_metrics_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not in Prometheus' format"):
        observed_load([text], [text], 10.0)


def test_a_cluster_without_requests_tells_no_load() -> None:
    metrics = [_metrics("pdserve_", {"+Inf": 5}, {"+Inf": 5})]
    with pytest.raises(PlanError, match="--look-s"):
        observed_load(metrics, metrics, 20.0)
