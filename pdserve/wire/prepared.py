"""Decode node → proxy: the answer to a ticket with ``Resume.prepare``, as JSON."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_PREPARED_BYTES = 2**20


class Prepared(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node can go on with an answer. It says how much of the answer it would have to replay."""

    prepared: bool
    block_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The tokens of a block; 0 if the node does not say."""
    lacking: dict[int, Annotated[int, msgspec.Meta(ge=0)]] = {}
    """The tokens, prompt included, whose blocks the node does not have: by choice, those that are over left out."""


def decode_prepared(data: bytes) -> Prepared:
    """Returns what the node says, or as much as nothing if that is something else: it has prepared all the same."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return Prepared(True)


_decoder = msgspec.json.Decoder(Prepared)
