"""What the API process is told after this step: one message for all requests."""

from __future__ import annotations

from pdserve.engine.request import Request
from pdserve.wire.engine import FinishReason, RequestOutput, RequestReport, StepOutput
from pdserve.wire.sampling import SampledToken


class Outbox:
    """Collects new tokens and endings until ``take``. Requests without a client (prefill nodes) produce nothing."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[SampledToken]] = {}
        self._endings: list[RequestOutput] = []

    def token(self, request: Request, token: SampledToken) -> None:
        if request.client is not None:
            self._tokens.setdefault(request.client, []).append(token)

    def ending(self, request: Request, reason: FinishReason, error: str | None) -> None:
        if request.client is not None:
            tokens = self._tokens.pop(request.client, [])
            self._endings.append(_output(request.client, tokens, reason, _report(request), error))

    def forget(self, request: Request) -> None:
        """Its client is gone."""
        if request.client is not None:
            self._tokens.pop(request.client, None)

    def take(self) -> StepOutput | None:
        """All since the last call; None if there is nothing."""
        if not self._tokens and not self._endings:
            return None
        outputs = [_output(client, tokens) for client, tokens in self._tokens.items()]
        step = StepOutput(outputs + self._endings)
        self._tokens, self._endings = {}, []
        return step


def _output(
    client: int,
    tokens: list[SampledToken],
    finish: FinishReason | None = None,
    report: RequestReport | None = None,
    error: str | None = None,
) -> RequestOutput:
    logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
    return RequestOutput(client, [token.token_id for token in tokens], finish, report, error, logprobs or None)


def _report(request: Request) -> RequestReport:
    prompt = request.elder or request
    admitted = request.arrived if prompt.admitted is None else prompt.admitted
    return RequestReport(
        prefill_source=prompt.prefill_source,
        prefill_node=prompt.prefill_node,
        cached_tokens=request.cached_tokens,
        queue_s=admitted - request.arrived,
        prefill_s=0.0 if request.first_token is None else request.first_token - admitted,
        transfer_s=prompt.transfer_seconds,
    )
