"""Cross-origin resource sharing: what a server tells browsers of the web pages whose scripts may read its answers.

The fields that are the same in all answers are among the server's default fields. Only where some origins are allowed
and others are not, the answer to a page has one more field, which names the page's origin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

Fields: TypeAlias = Sequence[tuple[bytes, bytes]]

EVERY_ORIGIN = "*"
EXPOSED = "x-request-id, retry-after, x-should-retry, x-pdserve-ignored"
"""The fields of answers that scripts may read beside those that browsers always let them read."""
PREFLIGHT_S = 600
"""How long a browser may remember the answer to a preflight request, in seconds."""

_FIELD_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")


class CrossOrigin:
    """The origins whose pages may use one server."""

    def __init__(self, origins: Sequence[str]) -> None:
        """``origins`` are like ``https://chat.example.com``, or the one ``*`` for all. Without any, none may."""
        every = EVERY_ORIGIN in origins
        self._every = every
        self._origins = frozenset(origin.lower().encode() for origin in origins if not every)
        self.selects = bool(self._origins)
        """Whether answers to allowed pages differ from others."""
        self.defaults: list[tuple[str, str]] = []
        """The fields of every answer."""
        if origins:
            self.defaults.append(("access-control-expose-headers", EXPOSED))
            self.defaults.append(("access-control-allow-origin", EVERY_ORIGIN) if every else ("vary", "origin"))

    def allows(self, origin: bytes) -> bool:
        """Returns whether pages of ``origin`` may use the server. What is no page sends no origin."""
        return self._every or origin.lower() in self._origins

    def fields(self, request: Fields) -> list[tuple[bytes, bytes]]:
        """Returns the fields that the answer to a request with these fields has beside the defaults."""
        for name, value in request:
            if name == b"origin":
                return [(b"access-control-allow-origin", value)] if self.allows(value) else []
        return []


def preflight_fields(wanted: str | None) -> dict[str, str]:
    """Returns what answers a preflight, with which a browser asks whether a page may send a request at all.

    ``wanted`` are the names of the request's fields. The answer means nothing to a browser if the server does not name
    the page's origin in it.
    """
    fields = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": str(PREFLIGHT_S)}
    if wanted is not None and _FIELD_NAMES.fullmatch(wanted):
        fields["access-control-allow-headers"] = wanted
    return fields
