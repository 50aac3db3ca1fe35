"""``pdserve serve`` is ``pdserve up``, by the name that other servers have for it."""

from __future__ import annotations

from pdserve.cli.up import run

__all__ = ["run"]
