"""Where every live request is, by its status."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from pdserve.engine.request import Request, Status


class Queues:
    """Siblings that wait for their elder's prompt are with their elder."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.remote: set[Request] = set()
        """Their prompts are being fetched."""
        self.pushing: set[Request] = set()

    @property
    def num_admitted(self) -> int:
        """Those in the batch, and those whose prompts are being fetched."""
        return len(self.running) + len(self.remote)

    @property
    def pending_prompt_tokens(self) -> int:
        """Tokens of admitted prompts that are to be computed here."""
        return sum(pending for request in self.running if (pending := request.num_pending_tokens) > 1)

    def live(self) -> Iterator[Request]:
        """Every request that holds something or waits for something."""
        for request in chain(self.waiting, self.running, self.remote, self.pushing):
            yield request
            yield from request.siblings

    def move(self, request: Request, status: Status) -> None:
        """Change a request's status, and with it the place where it is."""
        self._take_out(request)
        request.move(status)
        match status:
            case Status.WAITING:
                later = (i for i, other in enumerate(self.waiting) if other.arrived > request.arrived)
                self.waiting.insert(next(later, len(self.waiting)), request)
            case Status.RUNNING:
                self.running.append(request)
            case Status.WAITING_FOR_REMOTE_KVS:
                self.remote.add(request)
            case Status.PUSHING:
                self.pushing.add(request)

    def _take_out(self, request: Request) -> None:
        match request.status:
            case Status.WAITING:
                self.waiting.remove(request)
            case Status.RUNNING:
                self.running.remove(request)
            case Status.WAITING_FOR_REMOTE_KVS:
                self.remote.remove(request)
            case Status.PUSHING:
                self.pushing.remove(request)
            case Status.WAITING_FOR_PROMPT:
                if request.elder is not None:
                    request.elder.siblings.remove(request)
