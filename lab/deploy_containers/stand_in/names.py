"""A name server that answers as a cluster's would: addresses of Services and of their pods."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

Records = Mapping[str, Sequence[str]]
"""Addresses by name, in lower case and without the final dot."""

TTL_S = 5
"""What CoreDNS gives by default."""
_LARGEST_QUERY = 512
_HEADER = struct.Struct("!HHHHHH")
_QUESTION = struct.Struct("!HH")
_ANSWER = struct.Struct("!HHHIH4s")
_RESPONSE, _AUTHORITATIVE, _NO_SUCH_NAME = 0x8000, 0x0400, 3
_A, _IN = 1, 1
_QUESTION_NAME = 0xC000 | _HEADER.size


def answer(query: bytes, records: Records) -> bytes | None:
    """Returns the response to a query, or None for what is no query."""
    try:
        number, flags, questions, *_ = _HEADER.unpack_from(query)
        name, end = _name(query, _HEADER.size)
        kind, of_class = _QUESTION.unpack_from(query, end)
    except (struct.error, IndexError, UnicodeDecodeError):
        return None
    if flags & _RESPONSE or questions != 1:
        return None
    addresses = records.get(name.lower())
    # A name that has no address of the kind that is asked for is there all the same.
    given = list(addresses or ()) if (kind, of_class) == (_A, _IN) else []
    status = 0 if addresses is not None else _NO_SUCH_NAME
    answer_flags = _RESPONSE | _AUTHORITATIVE | (flags & 0x0100) | status
    head = _HEADER.pack(number, answer_flags, 1, len(given), 0, 0)
    question = query[_HEADER.size : end + _QUESTION.size]
    body = (_ANSWER.pack(_QUESTION_NAME, _A, _IN, TTL_S, 4, ipaddress.IPv4Address(each).packed) for each in given)
    return head + question + b"".join(body)


def _name(message: bytes, at: int) -> tuple[str, int]:
    labels = []
    while length := message[at]:
        labels.append(message[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(labels), at + 1


@contextmanager
def name_server(server: socket.socket, records: Callable[[], Records]) -> Iterator[None]:
    """Answers on ``server`` during the block, from what ``records`` returns at that moment."""
    server.setblocking(False)

    def answer_all() -> None:
        with suppress(BlockingIOError):
            while True:
                query, client = server.recvfrom(_LARGEST_QUERY)
                response = answer(query, records())
                if response is not None:
                    server.sendto(response, client)

    loop = asyncio.get_running_loop()
    loop.add_reader(server, answer_all)
    try:
        yield
    finally:
        loop.remove_reader(server)
