"""``pdserve prefill``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.cli.node import run_node
from pdserve.wire.discovery import Role


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """As ``node.run_node``."""
    return run_node(Role.PREFILL, argv, environ)
