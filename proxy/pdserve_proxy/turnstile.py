"""Lets tasks in by ``admission``: a task waits for its turn, and its place is given back whatever becomes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pdserve.errors import Unavailable
from pdserve_proxy.admission import Admission, Limits, Visit
from pdserve_proxy.metrics import ProxyMetrics


class Turnstile:
    def __init__(self, limits: Limits, metrics: ProxyMetrics) -> None:
        self._admission = Admission(limits)
        self._wait_s = limits.wait_s
        self._turns: dict[Visit, asyncio.Future[None]] = {}
        metrics.queued.set_function(lambda: self._admission.waiting)

    async def enter(self, caller: str, answers: int, hold: Callable[[Callable[[], None]], None]) -> None:
        """Returns when a request of ``caller`` for so many ``answers`` may go on.

        ``hold`` is given, before anything is waited for, the function that has to be called when the request is over.
        Raises TooManyRequests, or Unavailable if the queue is full or its turn does not come in time.
        """
        visit = self._admission.ask(caller, time.monotonic(), answers)  # the event loop's clock
        hold(lambda: self._leave(visit))
        if self._admission.is_inside(visit):
            return
        turn = self._turns[visit] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(visit.deadline_s):
                await turn
        except TimeoutError as exc:
            self._leave(visit)
            raise Unavailable(
                f"no room for this request within {self._wait_s:g} s", code="queue_timeout", retry_after_s=1
            ) from exc
        finally:
            self._turns.pop(visit, None)

    def _leave(self, visit: Visit) -> None:
        for following in self._admission.leave(visit):
            turn = self._turns.get(following)
            if turn is not None and not turn.done():
                turn.set_result(None)
