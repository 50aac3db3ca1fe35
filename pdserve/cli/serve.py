"""``pdserve serve`` is ``pdserve up``, by the name that other servers have for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.cli.up import command


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status of ``pdserve up``, whose help and errors have this name."""
    return command.run(argv, environ, prog="pdserve serve")
