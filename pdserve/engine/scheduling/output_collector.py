"""Gathers what the API process gets: a step's tokens and endings as one message, and timelines of ended requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pdserve.engine.request import Request
from pdserve.tracing.timeline import TimelineNotes
from pdserve.wire.engine import FinishReason, Recorded, RequestOutput, RequestReport, StepOutput
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve.wire.timeline import MomentKind, Phase, PhaseKind, ProcessKind, TimelinePart

log = logging.getLogger(__name__)


class OutputCollector:
    """Collects new tokens and endings until ``take``. Requests without a client (prefill nodes) produce nothing."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[SampledToken]] = {}
        self._endings: list[RequestOutput] = []
        self._scores: list[RequestOutput] = []

    def prompt_logprobs(self, local_id: int, logprobs: PromptLogprobs) -> None:
        """Takes the log probabilities of a prompt. They go before all tokens, as the clients of children need them."""
        self._scores.append(RequestOutput(local_id, [], prompt_logprobs=logprobs))

    def token(self, request: Request, token: SampledToken) -> None:
        if request.local_id is not None:
            self._tokens.setdefault(request.local_id, []).append(token)

    def ending(self, request: Request, reason: FinishReason, error: str | None) -> None:
        if request.local_id is not None:
            tokens = self._tokens.pop(request.local_id, [])
            log.debug(
                "%s local_id=%d output=%d finish=%s",
                request,
                request.local_id,
                request.num_generated_tokens,
                reason.value,
            )
            self._endings.append(_output(request.local_id, tokens, reason, _report(request), error))

    def forget(self, request: Request) -> None:
        """Drops the tokens of a request whose client is gone."""
        if request.local_id is not None:
            self._tokens.pop(request.local_id, None)

    def take(self) -> StepOutput | None:
        """Returns what was collected since the last call, or None if that is nothing."""
        if not self._tokens and not self._endings and not self._scores:
            return None
        outputs = [_output(local_id, tokens) for local_id, tokens in self._tokens.items()]
        step = StepOutput(self._scores + outputs + self._endings)
        self._tokens, self._endings, self._scores = {}, [], []
        return step


def _output(
    local_id: int,
    tokens: list[SampledToken],
    finish: FinishReason | None = None,
    report: RequestReport | None = None,
    error: str | None = None,
) -> RequestOutput:
    if len(tokens) == 1 and tokens[0].logprobs is None:
        return RequestOutput(local_id, [tokens[0].token_id], finish, report, error)
    logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
    return RequestOutput(local_id, [token.token_id for token in tokens], finish, report, error, logprobs or None)


def _report(request: Request) -> RequestReport:
    prompt = request.parent or request
    admitted = request.arrived if prompt.facts.admitted is None else prompt.facts.admitted
    return RequestReport(
        prefill_source=prompt.facts.prefill_source,
        prefill_node=prompt.facts.prefill_node,
        placed=prompt.facts.placed,
        cached_tokens=request.facts.cached_tokens,
        reused_tokens=request.facts.reused_tokens,
        queue_s=admitted - request.arrived,
        prefill_s=0.0 if request.facts.first_token_at is None else request.facts.first_token_at - admitted,
        transfer_s=prompt.facts.transfer_seconds,
    )


class TimelineRecorder:
    """Notes the requests of one engine, and gives what it did for those that have ended.

    Of a client request with many prompts only the first one is noted: the others go the same way.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: list[TimelinePart] = []

    def begin(self, request: Request) -> None:
        if request.serves_push or request.local_id == request.group_id:
            process = ProcessKind.PREFILL_ENGINE if request.serves_push else ProcessKind.ENGINE
            prompt = request.terms.prompt
            request.notes = TimelineNotes(process, prompt.request_id, request.arrived, prompt.trace)

    def end(self, request: Request, outcome: str) -> None:
        """Makes the timeline of a request that has ended, if it is noted."""
        notes, request.notes = request.notes, None
        if notes is not None:
            self._ended.append(_part(request, notes, self._clock(), outcome))

    def take(self) -> Recorded | None:
        """Returns the parts since the last call, or None if there is none."""
        if not self._ended:
            return None
        recorded, self._ended = Recorded(self._ended), []
        return recorded


def _part(request: Request, notes: TimelineNotes, now: float, outcome: str) -> TimelinePart:
    first_token_at = request.facts.first_token_at
    admitted = request.facts.admitted
    notes.add(Phase(kind=PhaseKind.QUEUE, start_s=request.arrived, end_s=now if admitted is None else admitted))
    if notes.chunks_from_s is not None:
        notes.add(
            Phase(
                kind=PhaseKind.PREFILL,
                start_s=notes.chunks_from_s,
                end_s=now if first_token_at is None else max(notes.chunks_from_s, first_token_at),
                tokens=request.num_prompt_tokens - request.facts.cached_tokens,
            )
        )
    generated = request.num_generated_tokens - request.num_emitted_tokens
    if first_token_at is not None:
        notes.moment(MomentKind.FIRST_TOKEN, first_token_at)
        if generated > 1:
            start_s = max(first_token_at, notes.fetched_at_s)
            notes.add(Phase(kind=PhaseKind.DECODE, start_s=min(start_s, now), end_s=now, tokens=generated - 1))
    return notes.part(
        now,
        outcome=notes.outcome or outcome,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.facts.cached_tokens,
        output_tokens=0 if request.serves_push else generated,
        drafts=request.facts.drafts,
        accepted_drafts=request.facts.accepted_drafts,
    )
