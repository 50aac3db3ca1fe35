"""Counts what the API process of a node sees of requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.api.generation.outcome import ChoiceOutcome
from pdserve.api.generation.request_log import RequestRecord
from pdserve.api.requests.prompts import Prompt
from pdserve.metrics.histogram import BucketCounts, seconds_to, tokens_to
from pdserve.wire.discovery import GapCounts
from pdserve.wire.engine import PrefillSource, RequestReport

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TAIL_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class MetricsScale:
    """What bounds a node's histograms."""

    timeout_s: float = 600.0
    max_model_len: int = 4096


class RequestMetrics(Collector):
    """What the API process counts of requests. One thread counts and collects."""

    def __init__(self, scale: MetricsScale) -> None:
        seconds, tokens = seconds_to(scale.timeout_s), tokens_to(scale.max_model_len)
        self._ttft, self._e2e = BucketCounts(seconds), BucketCounts(seconds)
        self._queue, self._prefill, self._decode = BucketCounts(seconds), BucketCounts(seconds), BucketCounts(seconds)
        self._inference = BucketCounts(seconds)
        self._itl, self._tpot, self._tail = map(BucketCounts, (_TOKEN_SECONDS, _TOKEN_SECONDS, _TAIL_SECONDS))
        self._prompt, self._generated = BucketCounts(tokens), BucketCounts(tokens)
        self._most_generated, self._max_tokens = BucketCounts(tokens), BucketCounts(tokens)
        self._answers = BucketCounts(_ANSWERS)
        self._outcomes = dict.fromkeys(ChoiceOutcome, 0)

    @property
    def gaps(self) -> GapCounts:
        """The times between tokens. Another thread may ask for them."""
        return GapCounts(self._itl.bounds, self._itl.counts)

    def began(self, prompts: Iterable[Prompt], answers: int) -> None:
        """Counts a client request, which wants so many ``answers`` to each of its prompts."""
        for prompt in prompts:
            self._prompt.observe(len(prompt.token_ids))
            self._max_tokens.observe(prompt.max_tokens)
        self._answers.observe(answers)

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def next_tokens(self, gap_s: float, count: int) -> None:
        """Observes ``count`` tokens that came at once, ``gap_s`` after the one before them."""
        self._itl.observe_equal(gap_s, count)

    def choice_ended(self, outcome: ChoiceOutcome, report: RequestReport | None, tokens: int) -> None:
        """Counts the end of a choice for which this node has generated ``tokens``."""
        self._outcomes[outcome] += 1
        if outcome.is_answer:
            self._generated.observe(tokens)
        if report is not None:
            self._queue.observe(report.queue_s)
            self._prefill.observe(report.prefill_s)
            if report.prefill_source is PrefillSource.REMOTE:
                self._tail.observe(report.transfer_s)

    def request_ended(self, record: RequestRecord, most_tokens: int, now: float) -> None:
        """Counts the end of a client request, whose longest choice has ``most_tokens`` of this node."""
        self._e2e.observe(now - record.arrived)
        if record.first_token is None or record.last_token is None:
            return
        self._decode.observe(now - record.first_token)
        self._most_generated.observe(most_tokens)
        if (tpot_s := record.tpot_s) is not None:
            self._tpot.observe(tpot_s)
        if record.reports:
            prefill_s = max([report.prefill_s for report in record.reports])
            self._inference.observe(prefill_s + record.last_token - record.first_token)

    def collect(self) -> Iterable[Metric]:
        yield self._ttft.family("pdserve_time_to_first_token_seconds", "from arrival to the first token")
        yield self._itl.family(
            "pdserve_inter_token_latency_seconds",
            "gap between two tokens; those that are sent in one chunk share the gap before it evenly",
        )
        yield self._e2e.family("pdserve_e2e_request_latency_seconds", "from arrival to the end")
        yield self._queue.family("pdserve_request_queue_time_seconds", "waiting in the engine")
        yield self._prefill.family("pdserve_request_prefill_time_seconds", "from the queue to the first token")
        yield self._decode.family("pdserve_request_decode_time_seconds", "from the first token to the end")
        yield self._inference.family("pdserve_request_inference_time_seconds", "from the queue to the last token")
        yield self._tpot.family(
            "pdserve_request_time_per_output_token_seconds", "mean of a request's tokens after the first"
        )
        yield self._tail.family(
            "pdserve_kv_transfer_tail_seconds", "from a remote first token to its prompt's last KV block"
        )
        yield self._prompt.family("pdserve_request_prompt_tokens", "tokens of a prompt")
        yield self._generated.family("pdserve_request_generation_tokens", "tokens of an answer")
        yield self._most_generated.family(
            "pdserve_request_max_num_generation_tokens", "tokens of a request's longest answer"
        )
        yield self._answers.family("pdserve_request_params_n", "answers that a request wants to each prompt")
        yield self._max_tokens.family("pdserve_request_params_max_tokens", "tokens that an answer may have")
        success = CounterMetricFamily("pdserve_request_success", "answers", labels=["finished_reason"])
        failure = CounterMetricFamily("pdserve_request_failure", "requests without one", labels=["reason"])
        for outcome, count in self._outcomes.items():
            (success if outcome.is_answer else failure).add_metric([outcome.value], count)
        yield success
        yield failure
