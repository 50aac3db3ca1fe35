"""Answers requests for responses that the proxy keeps, without asking a node."""

from __future__ import annotations

from typing import Literal

import msgspec
from quart import Quart, Response, request

from pdserve.errors import InvalidRequest, NotFound
from pdserve_proxy.credentials import ApiKeys
from pdserve_proxy.responses.items import page
from pdserve_proxy.responses.storage import ResponseStorage
from pdserve_proxy.responses.turn import not_found

MAX_PAGE = 100
DEFAULT_PAGE = 20

_encoder = msgspec.json.Encoder()


class DeletedResponse(msgspec.Struct):
    """The answer to a client that has deleted a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class StoredResponseRoutes:
    """``GET`` and ``DELETE /v1/responses/{id}``, and ``GET /v1/responses/{id}/input_items``."""

    def __init__(self, storage: ResponseStorage | None, keys: ApiKeys) -> None:
        """Without ``storage``, no response is found, and the client is told why."""
        self._storage = storage
        self._keys = keys

    def add_routes(self, app: Quart) -> None:
        app.add_url_rule("/v1/responses/<name>", "response", self.response, methods=["GET"])
        app.add_url_rule("/v1/responses/<name>", "delete_response", self.delete, methods=["DELETE"])
        app.add_url_rule("/v1/responses/<name>/input_items", "input_items", self.input_items, methods=["GET"])

    async def response(self, name: str) -> Response:
        owner, storage = self._reach()
        for field in ("stream", "starting_after"):
            if request.args.get(field, "false") != "false":
                raise InvalidRequest(
                    f"{field!r} is not supported by pdserve: a kept response comes in one piece",
                    param=field,
                    code="unsupported_parameter",
                )
        body = await storage.body(owner, name)
        if body is None:
            raise not_found(name)
        return _json(body)

    async def input_items(self, name: str) -> Response:
        owner, storage = self._reach()
        limit, order = _limit(request.args.get("limit")), request.args.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("'order' must be 'asc' or 'desc'", param="order")
        items = await storage.input_items(owner, name)
        if items is None:
            raise not_found(name)
        after = request.args.get("after")
        return _json(_encoder.encode(page(items, after=after, limit=limit, newest_first=order == "desc")))

    async def delete(self, name: str) -> Response:
        owner, storage = self._reach()
        if not await storage.delete(owner, name):
            raise not_found(name)
        return _json(_encoder.encode(DeletedResponse(name)))

    def _reach(self) -> tuple[str, ResponseStorage]:
        """Returns who asks, and the store. Raises Unauthorized, and NotFound without a store."""
        owner = self._keys.owner(request.headers.get("authorization"), request.headers.get("x-api-key"))
        if self._storage is None:
            raise NotFound("this server keeps no responses: see the setting --store", code="responses_not_stored")
        return owner, self._storage


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_PAGE
    if not (given.isascii() and given.isdigit()) or len(given) > 3 or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequest(f"'limit' must be a number from 1 to {MAX_PAGE}", param="limit")
    return int(given)


def _json(body: bytes) -> Response:
    return Response(body, content_type="application/json")
