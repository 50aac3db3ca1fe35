"""How a setting is declared. Each field's metadata carries its flag, help text and range."""

from __future__ import annotations

import enum
from dataclasses import field
from typing import Any

from pdserve.wire.terms import MAX_ITL_MS, MAX_TTFT_MS


def setting(
    flag: str,
    help: str,
    default: Any,
    *,
    metavar: str | None = None,
    bare: str | None = None,
    secret: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    former: str = "",
    spellings: dict[str, str] | None = None,
    refused: dict[str, str] | None = None,
    first: bool = False,
) -> Any:
    """Returns a dataclass field that users can set: ``--flag``, ``PDSERVE_FLAG``, and ``section.flag`` in TOML.

    ``minimum`` and ``maximum`` are inclusive. ``bare`` is the value that the flag has if none follows it. A ``secret``
    is left out of the dataclass's repr, of ``--help`` and of errors. ``former`` is the name that the flag had one
    version ago; it is still taken, with a warning. ``spellings`` are other words for a choice's values, and
    ``refused`` says why pdserve has not what other servers have. The short help
    shows what people set ``first``.
    """
    metadata = {
        "flag": flag,
        "help": help,
        "metavar": metavar,
        "bare": bare,
        "secret": secret,
        "minimum": minimum,
        "maximum": maximum,
        "former": former,
        "spellings": spellings or {},
        "refused": refused or {},
        "first": first,
    }
    return field(default=default, metadata=metadata, repr=not secret)


AUTO_IS_ZERO = {"auto": "0"}
"""The word for a size that pdserve chooses (``pdserve.models.sizes``)."""


class Switch(enum.Enum):
    ON = "on"
    OFF = "off"


def ttft_target(help: str) -> Any:
    """Returns the field of ``--target-ttft-ms``, which ``help`` says what is done with."""
    return setting("target-ttft-ms", help, 0.0, minimum=0, maximum=MAX_TTFT_MS, first=True)


def itl_target(help: str) -> Any:
    """Returns the field of ``--target-itl-ms``, which ``help`` says what is done with."""
    return setting("target-itl-ms", help, 0.0, minimum=0, maximum=MAX_ITL_MS, first=True)
