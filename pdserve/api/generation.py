"""The engine requests of one client request, and what the engine said about them and nobody has read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.errors import RequestError
from pdserve.wire.engine import FinishReason, RequestOutput

DEADLINE_GRACE_S = 1.0
"""The engine ends a request at its deadline; this much later the API does it, should the engine not."""


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """What one engine step added to one choice."""

    choice: int
    output: RequestOutput


class Generation:
    """Owned by one reader, who must ``close`` it on every path: what is unfinished then is aborted in the engine.

    However many outputs come before the reader runs, it is woken once.
    """

    def __init__(self, request_ids: Sequence[int], deadline_s: float, abort: Callable[[Sequence[int]], None]) -> None:
        self._choice_of = {request_id: choice for choice, request_id in enumerate(request_ids)}
        self._abort = abort
        self.failure: RequestError | None = None
        """Why the whole generation failed, if it was not the engine that said so of a request."""
        self._inbox: list[ChoiceOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(deadline_s + DEADLINE_GRACE_S, self._expire)

    def deliver(self, output: RequestOutput) -> None:
        """Of a request id that is this generation's; ignored once that choice is over."""
        choice = self._choice_of.get(output.request_id)
        if choice is None:
            return
        if output.finish is not None:
            del self._choice_of[output.request_id]
        self._inbox.append(ChoiceOutput(choice, output))
        self._wake()

    async def wait(self) -> list[ChoiceOutput]:
        """Everything since the last call, at least one; bounded by the deadline. Not to be called when all is read."""
        while not self._inbox:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._inbox = self._inbox, []
        return taken

    def end_choice(self, choice: int) -> None:
        """The reader needs no more of it: the engine forgets it."""
        self._end([request_id for request_id, index in self._choice_of.items() if index == choice])

    def fail(self, failure: RequestError) -> None:
        """Ends every open choice with ``FinishReason.ERROR``; ``failure`` is what the client is told."""
        self.failure = failure
        for request_id in list(self._choice_of):
            self.deliver(RequestOutput(request_id, [], FinishReason.ERROR, None, failure.message))

    def close(self) -> None:
        """Again and again, if need be."""
        self._timer.cancel()
        self._end(list(self._choice_of))

    def _expire(self) -> None:
        open_ids = list(self._choice_of)
        for request_id in open_ids:
            self.deliver(RequestOutput(request_id, [], FinishReason.DEADLINE))
        self._abort(open_ids)

    def _end(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            del self._choice_of[request_id]
        if request_ids:
            self._abort(request_ids)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
