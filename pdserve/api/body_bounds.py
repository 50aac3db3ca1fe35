"""How many JSON values a body may hold, whatever its size.

Each costs time in which the interpreter does nothing else, a hundred times that of a byte of text: 8 MiB of ``[],``
took a second. They are counted without being built, in pieces, so that other threads get their turns.
"""

from __future__ import annotations

from pdserve.errors import InvalidRequest

UNCOUNTED_BYTES = 100_000
"""Shorter bodies cannot hold too many."""
MAX_CONTAINERS = 50_000
"""Lists, objects and the entries of objects."""
MAX_ITEMS = 500_000
"""Values in lists and objects: the token ids of prompts, above all."""
_PIECE_BYTES = 65_536


def check_values(body: bytes) -> None:
    """Raises InvalidRequest for a body with too many values. Of one that is no JSON it may say anything."""
    if len(body) <= UNCOUNTED_BYTES:
        return
    containers = items = start = 0
    in_string = False
    while start < len(body):
        piece = _piece(body, start)
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        containers += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        items += outside.count(b",")
        if containers > MAX_CONTAINERS or items > MAX_ITEMS:
            raise InvalidRequest(
                f"the body holds too many JSON values: at most {MAX_CONTAINERS} lists, objects and fields, "
                f"and {MAX_ITEMS} values in them",
                code="too_many_values",
            )


def _piece(body: bytes, start: int) -> bytes:
    """The next piece, which does not end between a backslash and what that escapes."""
    piece = body[start : start + _PIECE_BYTES]
    backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return piece + body[start + len(piece) : start + len(piece) + 1] if backslashes % 2 else piece
