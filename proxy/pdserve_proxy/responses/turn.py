"""One request to ``/v1/responses`` at a proxy that stores responses: what it goes on from, and what becomes of it.

The proxy does not parse the events of a stream. It looks for the line that begins the last one, which has the whole
response, whichever nodes have made it, and holds that event back until the response is in the store. So a client that
has a response can go on from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from pdserve.errors import InvalidRequest, NotFound, PayloadTooLarge, RequestError
from pdserve.http.request import BodyBounds
from pdserve.wire.terms import Storing
from pdserve_proxy.requests.request_body import GenerationBody
from pdserve_proxy.responses.items import input_items, output_items
from pdserve_proxy.responses.store import FinishedResponse, ResponseStorage

RESPONSES_PATH = "/v1/responses"
RESPONSE_ID_START = "resp_"
_LAST_EVENTS = (b"event: response.completed\ndata: ", b"event: response.incomplete\ndata: ")
"""How the last event of a stream begins. No text has such a line, because JSON escapes its ends of lines."""
_STORED_STATUSES = ("completed", "incomplete")

log = logging.getLogger(__name__)


class _Request(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw(b"")
    store: bool | None = None
    previous_response_id: str | None = None


class _Response(msgspec.Struct):
    id: str
    status: str
    output: msgspec.Raw


class _LastEvent(msgspec.Struct):
    response: msgspec.Raw


class StoredTurn:
    """One request and its response, used as a context manager: what it holds in the store is given up at the exit."""

    def __init__(self, storage: ResponseStorage, max_body_bytes: int) -> None:
        """``max_body_bytes`` bound the items before the request's own, as they bound its body."""
        self._storage = storage
        self._max_body_bytes = max_body_bytes
        self._key = storage.new_key()
        self._begun = False
        """Whether the store may have something of it that is not over."""
        self.storing = Storing(stored=False)
        self._held: list[bytes] | None = None
        """The pieces of the last event, once that has begun."""
        self._held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abandon()

    async def begin(self, owner: str, body: GenerationBody, bounds: BodyBounds) -> GenerationBody:
        """Returns the body as it goes to a node: with the items before its own behind it.

        Raises InvalidRequest, NotFound if ``owner`` has no such previous response, PayloadTooLarge and Unavailable.
        """
        asked = _read(body.data)
        stores = asked.store is not False
        if not stores and asked.previous_response_id is None:
            return body
        if not (asked.previous_response_id or RESPONSE_ID_START).startswith(RESPONSE_ID_START):
            raise InvalidRequest(
                f"'previous_response_id' has to begin with {RESPONSE_ID_START!r}", param="previous_response_id"
            )
        items = input_items(asked.input) if stores else b""
        bounds.add(len(items))
        self._begun = True
        begun = await self._storage.begin(self._key, owner, asked.previous_response_id, items, body.prompt_start)
        if begun is None:
            raise not_found(asked.previous_response_id or "", "previous_response_id")
        self.storing = Storing(begun.accepted, len(begun.history))
        if not begun.history:
            return body
        if len(begun.history) > self._max_body_bytes:
            raise PayloadTooLarge(
                f"the conversation before this request is above {self._max_body_bytes} bytes",
                param="previous_response_id",
            )
        bounds.add(len(begun.history))
        return msgspec.structs.replace(body, data=body.data + begun.history, prompt_start=begun.prompt_start)

    async def keep_whole(self, status: int, body: bytes) -> None:
        """Stores the response that goes to the client in one piece, if it is one."""
        if status == 200 and self.storing.stored:
            await self._keep(body)

    def writer(self, write: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        """Returns ``write`` for pieces of a stream. The last event is held back."""
        return lambda piece: not (shown := self.pass_on(piece)) or write(shown)

    def pass_on(self, piece: bytes) -> bytes:
        """Returns what may go to the client now of the next piece of a stream."""
        if not self.storing.stored:
            return piece
        if self._held is None:
            start = min([at for event in _LAST_EVENTS if (at := piece.find(event)) >= 0], default=-1)
            if start < 0:
                return piece
            self._held, piece, shown = [], piece[start:], piece[:start]
        else:
            shown = b""
        self._held.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > self._storage.limits.share_bytes:
            log.warning("a response of more than %d bytes is not stored: see --store-mib", self._held_bytes)
            self._abandon()
            self.storing = Storing(stored=False)
            return shown + b"".join(self._held)
        return shown

    async def end(self) -> bytes:
        """Stores the response whose stream is over, and returns what was held back of it."""
        if self._held is None or not self.storing.stored:
            return b""
        held = b"".join(self._held)
        first, _, rest = held.partition(b"\n\n")
        if not rest:  # or else an error follows
            try:
                data = msgspec.json.decode(first.partition(b"\ndata: ")[2], type=_LastEvent).response
            except msgspec.DecodeError:
                log.warning("the last event of a response is none, so the response is not stored")
            else:
                await self._keep(bytes(data))
        return held

    def _abandon(self) -> None:
        if self._begun:
            self._begun = False
            self._storage.abandon(self._key)

    async def _keep(self, body: bytes) -> None:
        """Stores a response. If it cannot be stored, its client gets it all the same."""
        if len(body) > self._storage.limits.share_bytes:
            log.warning("a response of %d bytes is not stored: see --store-mib", len(body))
            return
        try:
            read = msgspec.json.decode(body, type=_Response)
            output = output_items(bytes(read.output))
        except msgspec.DecodeError:
            log.warning("a response is not stored, because it has no id or no output")
            return
        if read.status not in _STORED_STATUSES:
            return
        try:
            stored = await self._storage.finish(self._key, FinishedResponse(read.id, output, body))
        except RequestError as exc:
            log.warning("a response is not stored: %s", exc)
            return
        self._begun = False
        if not stored:
            log.warning("a response of %d bytes is not stored: the store has no space for it", len(body))


def not_found(response: str, param: str | None = None) -> NotFound:
    """Returns the error for a response that the client does not have."""
    code = "response_not_found" if param is None else "previous_response_not_found"
    # The words are OpenAI's, for which clients look.
    return NotFound(f"Response with id {response[:200]!r} not found.", param=param, code=code)


def _read(body: bytes) -> _Request:
    try:
        return msgspec.json.decode(body, type=_Request)
    except RecursionError as exc:
        raise InvalidRequest("the request body is nested too deeply", code="json_too_deep") from exc
    except msgspec.ValidationError as exc:
        named = [name for name in ("store", "previous_response_id") if f"$.{name}" in str(exc)]
        raise InvalidRequest(f"request body: {exc}", param=named[0] if named else None) from exc
