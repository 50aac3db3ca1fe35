"""Names things by identities. Each identity has one type, which is the same on every channel.

A request has four:

* ``request_id`` is a text, the label that the client sees as ``x-request-id``. The client gives it, or the first
  process that the request reaches makes it. Every process writes it into its log lines about the request, as
  ``request_id=…``, so that one grep finds a request everywhere. It is never a key: two requests may have the same.
* ``uuid`` is 16 random bytes, which the decode node's API process makes for each prompt of a client request. Prefill
  nodes know the prompt by it, as a part of its ``TransferId``.
* ``local_id`` is a number that the API process gives to each answer (``n`` of them to each prompt). It is the key
  between the API process and the engine process of one node, and means nothing elsewhere.
* ``group_id`` is the ``local_id`` of the first answer to a client request, and the same for all its prompts and
  answers: the engine's scheduler lets client requests take turns by it. On a prefill node it is the ``uuid``.

An engine's request that computes a prompt is the *parent* of the others that answer the same prompt, its *children*.
"""

from __future__ import annotations

import secrets
from typing import Annotated, TypeAlias

import msgspec

BootId: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""The identity of one start of one node: 16 random bytes. A node that restarts at the same address has another."""

MAX_REQUEST_ID_CHARS = 128

RequestId: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID_CHARS, pattern=r"\A[\x21-\x7e]*\Z")]
"""The label of a client request: visible ASCII without blanks, so that it cannot forge a field or a line of a log."""

RequestUuid: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""The identity of one prompt of one client request."""


def new_id() -> bytes:
    """Returns 16 random bytes, for a boot id or a request uuid."""
    return secrets.token_bytes(16)


class TransferId(msgspec.Struct, frozen=True, array_like=True):
    """The identity of one attempt to move one request's KV cache. A retry is another transfer."""

    request: RequestUuid
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1_000)]
    decode_boot: BootId

    def __str__(self) -> str:
        return f"{self.request.hex()[:12]}/{self.attempt}"
