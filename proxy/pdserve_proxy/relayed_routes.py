"""Handles the routes that nodes answer: admits a request, relays it, and answers with the node's response."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import re

import msgspec

from pdserve.config import SharedPrefixes
from pdserve.errors import DeadlineExceeded, InvalidRequest, RequestError, forget_frames
from pdserve.http.errors import internal_error
from pdserve.http.model_list import model_in_query
from pdserve.http.request import TRACEPARENT, ClientGone, HttpRequest
from pdserve.http.routes import TOKENIZER_INFO_PATH
from pdserve.wire.ids import new_id
from pdserve.wire.replay import digest, read_event_id
from pdserve.wire.terms import Keep, Terms
from pdserve_proxy.credentials import ANONYMOUS, ApiKeys
from pdserve_proxy.relay.complete_answer import CompleteResponse
from pdserve_proxy.relay.dispatch import NodeRequest
from pdserve_proxy.relay.outcomes import RelayOutcome
from pdserve_proxy.relay.relay import COMPLETION_ROUTES, Relay, StreamedResponse
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.requests.admission_queue import AdmissionController
from pdserve_proxy.requests.held_bodies import HeldBodies, client_of
from pdserve_proxy.requests.request_body import GenerationBody, read_body
from pdserve_proxy.responses.store import ResponseStorage
from pdserve_proxy.responses.turn import StoredTurn

RELAYED_ROUTES = COMPLETION_ROUTES | {"/detokenize", "/tokenize", "/v1/messages/count_tokens"}
READ_ROUTES = frozenset({TOKENIZER_INFO_PATH})
"""Clients ask these with GET and name the model in the query. A node gets that as the body of a POST."""

CLIENT_BYTES = 16
KNOWN_CLIENTS = 4096
"""The number of clients whose names in tickets are remembered."""
LARGE_BYTES = 256 * 1024
"""Larger bodies are read one at a time, and before each one all other requests get a turn of the event loop."""

MAX_KEY_CHARS = 255
KEY_HEADER = b"idempotency-key"
EVENT_HEADER = b"last-event-id"

_OK = RelayOutcome.OK
_KEY = re.compile(rf"[\x20-\x7e]{{1,{MAX_KEY_CHARS}}}")

log = logging.getLogger(__name__)


class RelayedRoutes:
    """Answers requests to ``RELAYED_ROUTES`` and ``READ_ROUTES``."""

    def __init__(
        self,
        max_body_bytes: int,
        keys: ApiKeys,
        bodies: HeldBodies,
        admission: AdmissionController,
        relay: Relay,
        storage: ResponseStorage | None = None,
        *,
        priorities: bool = True,
        share_prefixes: SharedPrefixes = SharedPrefixes.KEY,
    ) -> None:
        """``storage`` has the responses that are stored, if any are.

        ``priorities`` says whether requests may have one, ``share_prefixes`` whose prompts each request may find in
        prefix caches.
        """
        self._storage = storage
        self._priorities = priorities
        self._share_prefixes = share_prefixes
        self._max_body_bytes = max_body_bytes
        self._keys = keys
        self._bodies = bodies
        self._admission = admission
        self._relay = relay
        self._large_body = asyncio.Lock()

    async def handle(self, request: HttpRequest) -> None:
        """Answers ``request``, with an error if it cannot be relayed. The relayed request ends with the answer."""
        with self._begin(request) as relayed:
            await self._serve(relayed, request)

    async def handle_stored(self, request: HttpRequest) -> None:
        """Answers a request as ``handle`` does, whose response may be stored."""
        assert self._storage is not None
        with StoredTurn(self._storage, self._max_body_bytes) as turn, self._begin(request) as relayed:
            await self._serve(relayed, request, turn)

    def _begin(self, request: HttpRequest) -> RelayedRequest:
        return self._relay.begin(request.task, request.label, request.path, request.header(TRACEPARENT))

    async def _serve(self, relayed: RelayedRequest, request: HttpRequest, turn: StoredTurn | None = None) -> None:
        try:
            result = await self._forward(relayed, request, turn)
        except asyncio.CancelledError:
            if not relayed.takes_cancel_as_cut():
                raise
            assert relayed.cut_short is not None
            await _refuse(relayed, request, relayed.cut_short.error, relayed.cut_short.outcome)
        except RequestError as exc:
            await _refuse(relayed, request, exc, RelayOutcome.REFUSED)
        except ClientGone:
            raise
        except Exception:
            log.exception("request_id=%s failed inside the proxy", relayed.request_id)
            await _refuse(relayed, request, internal_error("proxy"), RelayOutcome.FAILED)
        else:
            if isinstance(result, CompleteResponse):
                await _respond_whole(relayed, request, result, turn)
            else:
                await _respond(request, result, turn)

    async def _forward(
        self, relayed: RelayedRequest, request: HttpRequest, turn: StoredTurn | None
    ) -> CompleteResponse | StreamedResponse:
        credentials: tuple[str | None, str | None] = None, None
        caller, cache_owner = ANONYMOUS, b""
        if self._keys:
            credentials = request.header(b"authorization"), request.header(b"x-api-key")
            caller, cache_owner = self._keys.caller(*credentials), self._cache_owner(credentials)
        if request.method != "GET":
            request.check_body_form()
        # A place among the requests under way is taken when the body is there, so a slow sender keeps no other out.
        # Only this call and the journal of a stream keep the body: it is gone while an answer in one piece leaves.
        with self._bodies.hold(caller, request.address) as held:
            whole = request.take_body(self._max_body_bytes)
            if whole is None:
                data = await request.body(self._max_body_bytes, held)
            else:
                data = whole
                held.add(len(data))
            if request.method == "GET":
                data = msgspec.json.encode({"model": model_in_query(request.query)})
            body = read_body(data) if len(data) <= LARGE_BYTES else await self._read_large(data)
            if body.priority and not self._priorities:
                raise InvalidRequest(
                    "'priority' can only be 0: this server has the setting --priorities off",
                    param="priority",
                    code="unsupported_parameter",
                )
            fields = request.fields
            keep = None
            if KEY_HEADER in fields or EVENT_HEADER in fields:
                keep = self._keep(request, data, credentials)
            if turn is not None:
                body = await turn.begin(self._keys.owner(*credentials), body, held)
            relayed.queued()
            await self._admission.admit(caller, body.answers, relayed.hold_place, body.priority)
            terms = Terms(
                deadline_s=relayed.remaining_s,
                client=_short(caller, request.address),
                cache_owner=cache_owner,
                answer=self._relay.new_identity(request.path),
                storing=None if turn is None else turn.storing,
                keep=keep,
            )
            relayable = NodeRequest(request.path, body, request.header(b"accept"), terms)
            return await self._relay.forward(relayed, relayable)

    def _cache_owner(self, credentials: tuple[str | None, str | None]) -> bytes:
        if self._share_prefixes is SharedPrefixes.ALL:
            return b""
        owner = self._keys.owner(*credentials)
        return b"" if owner == ANONYMOUS else _cache_owner(owner)

    def _keep(self, request: HttpRequest, data: bytes, credentials: tuple[str | None, str | None]) -> Keep | None:
        """Returns how a node stores the answer for a client that may ask again. Raises InvalidRequest."""
        if request.path not in COMPLETION_ROUTES:
            return None
        key, last_event = request.header(KEY_HEADER), request.header(EVENT_HEADER)
        return wanted_keep(key, last_event, self._keys.owner(*credentials), request.path, data)

    async def _read_large(self, data: bytes) -> GenerationBody:
        async with self._large_body:
            await asyncio.sleep(0)
            return read_body(data)


@functools.lru_cache(maxsize=KNOWN_CLIENTS)
def _short(caller: str, address: str) -> bytes:
    """Returns what stands for a client in tickets, which should not name a client's key or address."""
    client = client_of(caller, address)
    return hashlib.blake2b(client.encode(errors="replace"), digest_size=CLIENT_BYTES).digest()


@functools.lru_cache(maxsize=KNOWN_CLIENTS)
def _cache_owner(owner: str) -> bytes:
    """Returns what stands for the owner of a key, at every proxy that has the key."""
    return digest(b"cache owner", owner.encode(errors="replace"))


async def _respond_whole(
    relayed: RelayedRequest, request: HttpRequest, result: CompleteResponse, turn: StoredTurn | None
) -> None:
    # From here on a cut lets the answer out that has come, also while the store takes it.
    relayed.begin_relaying(result.status)
    if turn is not None:
        await turn.keep_whole(result.status, result.body)
    await request.respond(result.status, result.headers, result.body)
    relayed.relayed_bytes = len(result.body)
    relayed.end(_outcome(result.status))


async def _respond(request: HttpRequest, result: StreamedResponse, turn: StoredTurn | None) -> None:
    if turn is not None:
        await _respond_stored(request, result, turn)
        return
    stream = result.body
    await request.begin(result.status, result.headers, stream.first, more=not stream.over)
    while not stream.over:
        data = await stream.next(request.write)
        await request.send(data, more=not stream.over)
    stream.end()


def _outcome(status: int) -> RelayOutcome:
    """Returns how a request has ended that a node has answered in one piece."""
    if status < 400:
        return _OK
    return RelayOutcome.TIMED_OUT if status == DeadlineExceeded.status else RelayOutcome.REFUSED


async def _respond_stored(request: HttpRequest, result: StreamedResponse, turn: StoredTurn) -> None:
    """Sends a stream whose last event waits until the response is stored."""
    stream, write = result.body, turn.writer(request.write)
    over = stream.over
    first = turn.pass_on(stream.first) + (await turn.end() if over else b"")
    await request.begin(result.status, result.headers, first, more=not over)
    while not over:
        data = turn.pass_on(await stream.next(write))
        over = stream.over
        if over:
            data += await turn.end()
        await request.send(data, more=not over)
    stream.end()


async def _refuse(relayed: RelayedRequest, request: HttpRequest, error: RequestError, outcome: RelayOutcome) -> None:
    forget_frames(error)  # some of them hold ``relayed``, and the body
    relayed.error = error
    relayed.end(outcome, error.status)
    await request.refuse(error)


def wanted_keep(key: str | None, last_event: str | None, owner: str, path: str, body: bytes) -> Keep | None:
    """Returns how the answer is to be stored, or which one is asked for again; None if the headers say nothing of it.

    ``Idempotency-Key`` names the answer. A client without one sends ``Last-Event-ID``: empty at first, so that events
    have ids, and then the last id that it got. The owner of the API key and the request's body are part of the name.
    ``key`` and ``last_event`` are the values of the two headers. Raises InvalidRequest.
    """
    if key is None and last_event is None:
        return None
    if key is not None and _KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"'Idempotency-Key' takes 1 to {MAX_KEY_CHARS} printable characters of ASCII",
            code="invalid_idempotency_key",
        )
    seen = read_event_id(last_event) if last_event else None
    if last_event and seen is None:
        raise InvalidRequest(
            "'Last-Event-ID' has to be the id of an event of this answer, or empty", code="invalid_last_event_id"
        )
    owned = owner.encode(errors="replace")
    named = None if key is None else digest(b"key", owned, key.encode())
    if seen is not None and named not in (None, seen.key):
        raise InvalidRequest(
            "'Last-Event-ID' is of another answer than 'Idempotency-Key'", code="invalid_last_event_id"
        )
    answer = seen.key if seen is not None else named or new_id()
    after = seen.place if seen is not None else None
    return Keep(answer, digest(b"owner", owned), digest(path.encode(), body), after)
