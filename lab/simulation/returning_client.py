"""A client that wants its whole answer: it asks again, at another proxy, whatever happens to the one that it has asked.

It sends an idempotency key with its request, and the id of the last event that it got. So it goes on behind that event.
If the cluster has lost the answer, it begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from lab.simulation.clients import ClientRequest, Outcome, try_once

PAUSE_S = 0.3
GONE = 410


async def ask_until_complete(request: ClientRequest, hosts: Sequence[str], port: int, within_s: float) -> None:
    """Asks until the answer is whole, or ``within_s`` are over: then the outcome is that of the last attempt."""
    loop = asyncio.get_running_loop()
    request.began_s = loop.time()
    if not request.planned.key:
        request.planned = replace(request.planned, key=f"key of {request.number}")
    while True:
        _prepare(request)
        outcomes = await try_once(request, hosts[(request.planned.proxy + request.tries - 1) % len(hosts)], port)
        if outcomes == [Outcome.COMPLETE] or loop.time() - request.began_s > within_s:
            break
        await asyncio.sleep(PAUSE_S)
    request.outcomes += outcomes or [Outcome.CUT]
    request.ended_s = loop.time()


def _prepare(request: ClientRequest) -> None:
    """Makes this a request for what is still missing of the answer."""
    goes_on = request.planned.stream and request.last_event and request.status != GONE
    if not goes_on:
        request.choices, request.last_event = {}, ""
    request.headers = (f"last-event-id: {request.last_event}",) if goes_on else ()
    request.tries += 1
    request.status, request.error = 0, ""
