"""Reads a response in one piece: as it comes, or one that its node journals (``pdserve.control.journal``).

The journal of such an answer is stored as that of a stream is. When the node is lost, another one goes on with the
answer, whose client has nothing of it yet and gets all of it in the end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from pdserve.control.journal import JOURNALED_ANSWER, AnswerError, AnswerReader, cut_move_lines
from pdserve.errors import BadUpstream
from pdserve.patience import PatientTimeout
from pdserve_proxy.continuation.journal import RelayJournal
from pdserve_proxy.continuation.resume import Resumption
from pdserve_proxy.relay.dispatch import REFUSALS
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.upstream.node_connection import NodeLost, NodeResponse

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 64 * 2**20
RESUMED_TYPES = frozenset({JOURNALED_ANSWER, "application/json"})
"""The content types with which a node goes on with an answer in one piece. One that is ready soon has no journal."""
RELAYED_HEADERS = frozenset(
    {
        "content-type",
        "content-encoding",
        "retry-after",
        "cache-control",
        "x-accel-buffering",
        "x-should-retry",
        "x-pdserve-ignored",
    }
)
"""The headers of a node's response that the client gets. The proxy sets ``x-request-id`` itself."""


class CompleteResponse(msgspec.Struct, frozen=True):
    """A response in one piece."""

    status: int
    headers: dict[str, str]
    body: bytes


async def read_complete(relayed: RelayedRequest, response: NodeResponse) -> CompleteResponse:
    """Returns the complete response, of which the client has nothing yet.

    Raises NodeLost, and BadUpstream if it is too large.
    """
    answer = take_complete(relayed, response)
    if answer is None:
        body = await _read_all(relayed, response)
        answer = CompleteResponse(response.status, relayed_headers(response.headers), body)
    return answer


def take_complete(relayed: RelayedRequest, response: NodeResponse) -> CompleteResponse | None:
    """Returns the complete response if all of it has come with its head, as most have; None if not."""
    body = response.take_complete()
    if body is None:
        return None
    if body and response.status not in REFUSALS:
        relayed.got_byte()
    return CompleteResponse(response.status, relayed_headers(response.headers), body)


def relayed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name in RELAYED_HEADERS}


class JournaledAnswer:
    """An answer in one piece that has a journal, of one node after the other."""

    def __init__(
        self, relayed: RelayedRequest, response: NodeResponse, journal: RelayJournal, silence_s: float
    ) -> None:
        """A node that says nothing for ``silence_s`` counts as lost: its first token is there, and others follow."""
        relayed.tells_first_token = True
        relayed.prompt_computed()
        self._silence_s = silence_s
        self._relayed = relayed
        self._journal = journal
        self._response = response
        self._reader = AnswerReader(MAX_ANSWER_BYTES)

    async def read(self, resumption: Resumption) -> CompleteResponse:
        """Returns the complete answer, whichever node ends it.

        Raises ResumeFailed if its node is lost and no other one goes on, BadUpstream if a node sends something else.
        """
        while True:
            try:
                return await self._rest()
            except NodeLost as exc:
                loss, relayed = exc, self._relayed
                if not resumption.planned:
                    relayed.node_lost()
                    log.warning(
                        "request_id=%s decode=%s lost while answering: %s",
                        relayed.request_id,
                        relayed.decode_name,
                        loss,
                    )
            await resumption.go_on(self._begin, loss)

    async def _begin(self, response: NodeResponse) -> bytes:
        """Waits until the node of ``response`` has said something of the answer. Raises NodeLost."""
        self._response = response
        self._reader = AnswerReader(MAX_ANSWER_BYTES)
        if response.content_type == JOURNALED_ANSWER:
            while not await self._feed():
                if response.exhausted:
                    raise NodeLost("it ended the answer before its first token")
        self._relayed.open_again()
        return b""

    async def _rest(self) -> CompleteResponse:
        if self._response.content_type != JOURNALED_ANSWER:
            return await read_complete(self._relayed, self._response)
        while not self._response.exhausted:
            await self._feed()
        head = self._reader.head
        if head is None:
            raise NodeLost("it ended the answer without its end")
        self._relayed.got_byte()
        return CompleteResponse(head.status, relayed_headers(head.headers), self._reader.body())

    async def _feed(self) -> bool:
        """Reads what comes next. Returns whether that is an entry or of the answer itself. Raises NodeLost."""
        try:
            async with PatientTimeout(self._silence_s):
                piece = await self._response.read()
        except TimeoutError as exc:
            raise NodeLost(f"silent for {self._silence_s:g} s") from exc
        try:
            entries, tokens = cut_move_lines(self._reader.feed(piece))
        except AnswerError as exc:
            name = self._relayed.decode_name
            raise BadUpstream(f"node {name} gave an unexpected answer: {exc}", code="upstream_invalid") from exc
        self._journal.keep(entries)
        self._journal.want_blocks(tokens)
        return bool(entries) or self._reader.head is not None


async def _read_all(relayed: RelayedRequest, response: NodeResponse) -> bytes:
    pieces = []
    size = 0
    while not response.exhausted and (piece := await response.read()):
        if response.status not in REFUSALS:
            relayed.got_byte()
        pieces.append(piece)
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise BadUpstream(f"a node's answer is above {MAX_ANSWER_BYTES} bytes", code="upstream_invalid")
    return b"".join(pieces)
