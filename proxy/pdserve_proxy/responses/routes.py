"""Answers requests for responses that the proxy stores, without asking a node.

A client that reads slowly keeps what it was sent in memory, so this counts among what bodies the client holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import parse_qsl

import msgspec

from pdserve.errors import InvalidRequest, NotFound
from pdserve.http.request import JSON, HttpRequest
from pdserve.http.routes import Handler
from pdserve_proxy.credentials import ApiKeys
from pdserve_proxy.requests.held_bodies import HeldBodies, HeldBody
from pdserve_proxy.responses.items import page
from pdserve_proxy.responses.store import ResponseStorage
from pdserve_proxy.responses.turn import RESPONSES_PATH, not_found

MAX_PAGE = 100
DEFAULT_PAGE = 20
MAX_QUERY_FIELDS = 100

_PATH = re.compile(rf"{RESPONSES_PATH}/(?P<name>[^/]+)(?P<items>/input_items)?")
_encoder = msgspec.json.Encoder()


class DeletedResponse(msgspec.Struct):
    """The answer to a client that has deleted a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class StoredResponseRoutes:
    """``GET`` and ``DELETE /v1/responses/{id}``, and ``GET /v1/responses/{id}/input_items``."""

    def __init__(self, storage: ResponseStorage | None, keys: ApiKeys, bodies: HeldBodies) -> None:
        """Without ``storage``, no response is found, and the client is told why."""
        self._storage = storage
        self._keys = keys
        self._bodies = bodies
        self._of_response: Mapping[str, Handler] = {"GET": self.response, "DELETE": self.delete}
        self._of_items: Mapping[str, Handler] = {"GET": self.input_items}

    def find(self, path: str) -> Mapping[str, Handler] | None:
        """Returns the handlers of a path by method; None if it is none of these routes."""
        match = _PATH.fullmatch(path)
        if match is None:
            return None
        return self._of_items if match["items"] else self._of_response

    async def response(self, request: HttpRequest) -> None:
        owner, storage = self._reach(request)
        query, name = _query(request), _name(request)
        for field in ("stream", "starting_after"):
            if query.get(field, "false") != "false":
                raise InvalidRequest(
                    f"{field!r} is not supported by pdserve: a stored response comes in one piece",
                    param=field,
                    code="unsupported_parameter",
                )
        with self._hold(request) as held:
            body = await storage.body(owner, name)
            if body is None:
                raise not_found(name)
            held.add_stored(len(body))
            await request.respond(200, JSON, body)

    async def input_items(self, request: HttpRequest) -> None:
        owner, storage = self._reach(request)
        query, name = _query(request), _name(request)
        limit, order = _limit(query.get("limit")), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("'order' must be 'asc' or 'desc'", param="order")
        with self._hold(request) as held:
            items = await storage.input_items(owner, name)
            if items is None:
                raise not_found(name)
            # A page is no larger than all items, which are gone when it leaves.
            held.add_stored(len(items))
            shown = _encoder.encode(page(items, after=query.get("after"), limit=limit, newest_first=order == "desc"))
            del items
            await request.respond(200, JSON, shown)

    async def delete(self, request: HttpRequest) -> None:
        owner, storage = self._reach(request)
        name = _name(request)
        if not await storage.delete(owner, name):
            raise not_found(name)
        await request.respond(200, JSON, _encoder.encode(DeletedResponse(name)))

    def _reach(self, request: HttpRequest) -> tuple[str, ResponseStorage]:
        """Returns who asks, and the store. Raises Unauthorized, and NotFound without a store."""
        owner = self._keys.owner(*_credentials(request))
        if self._storage is None:
            raise NotFound("this server stores no responses: see the setting --store", code="responses_not_stored")
        return owner, self._storage

    def _hold(self, request: HttpRequest) -> HeldBody:
        return self._bodies.hold(self._keys.caller(*_credentials(request)), request.address)


def _credentials(request: HttpRequest) -> tuple[str | None, str | None]:
    return request.header(b"authorization"), request.header(b"x-api-key")


def _name(request: HttpRequest) -> str:
    match = _PATH.fullmatch(request.path)
    assert match is not None
    return match["name"]


def _query(request: HttpRequest) -> dict[str, str]:
    """Returns the fields of the URL's query; of one that comes twice, the last."""
    try:
        return dict(parse_qsl(request.query.decode("latin-1"), max_num_fields=MAX_QUERY_FIELDS))
    except ValueError as exc:
        raise InvalidRequest(f"the query has more than {MAX_QUERY_FIELDS} fields") from exc


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_PAGE
    if not (given.isascii() and given.isdigit()) or len(given) > 3 or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequest(f"'limit' must be a number from 1 to {MAX_PAGE}", param="limit")
    return int(given)
