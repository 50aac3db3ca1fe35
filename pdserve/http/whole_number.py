"""Reads integers of request bodies, for proxies and nodes alike. They may be written like ``3.0`` or ``1e2`` too.

A proxy counts what a request asks for, and a node does it, so both have to read the same number in the same bytes.
"""

from __future__ import annotations

MOST_DIGITS = 18
"""An integer of more digits is beyond all that any field takes. Python's ``int`` refuses some thousands of them."""


_MOST = int("9" * MOST_DIGITS)
_FIRST = frozenset(b"%c" % character for character in b"-0123456789")


def as_whole(number: str) -> float | int:
    """Returns a number that is written with a point or an exponent; as an integer if it is one."""
    value = float(number)
    return int(value) if value.is_integer() else value


def read_whole(value: bytes) -> int | None:
    """Returns the integer that is this JSON value; None for any other value.

    One of more than ``MOST_DIGITS`` digits comes as the least or greatest number of so many.
    """
    if value[:1] not in _FIRST:
        return None
    text = value.decode("latin-1")
    try:
        if any(mark in text for mark in ".eE"):
            number = float(text)
            return int(number) if number.is_integer() else None
        if len(text) > MOST_DIGITS:
            return -_MOST if text[0] == "-" else _MOST
        return int(text)
    except ValueError:  # msgspec has found the end of the number, and a node will find that it is none
        return None
