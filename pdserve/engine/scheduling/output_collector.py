"""Gathers the tokens and endings of a step, so that they go to the API process as one message."""

from __future__ import annotations

import logging

from pdserve.engine.request import Request
from pdserve.wire.engine import FinishReason, RequestOutput, RequestReport, StepOutput
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken

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
