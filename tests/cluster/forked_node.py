"""Processes of a cluster as forks of one that has loaded their modules: ``tests.forks`` starts them.

A node that starts by itself takes two seconds of a core, most of them to load modules. The shared clusters of
``pdserve.serve``, those of models with latents, experts or states, and all tests of faults, of hosts and of the command
line start processes as users do: what a start needs is not there already.
``python -m tests.cluster.forked_node SOCKET ROLE FLAGS`` is a node whose engine is such a fork, too.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import ExitStack
from functools import cache, partial

from pdserve.api.node import server
from pdserve.cli.main import main as pdserve
from tests.forks import Forks, forks_of

MODULE = "tests.cluster.forked_node"
_LOADED = (
    # Torch as an engine has it comes first.
    "tests.cluster.forked_engine",
    "pdserve.api.node.server",
    "pdserve.cli.main",
    "pdserve.cli.servers",
    "pdserve.cli.start_checks",
    "pdserve.hub.finding",
    "pdserve_proxy.server",
    "tokenizers",
)


@cache
def forks() -> Forks:
    """Returns what starts processes as forks. It ends with the tests."""
    stack = ExitStack()
    atexit.register(stack.close)
    # A fork has no threads of numpy's.
    return stack.enter_context(forks_of(*_LOADED, OPENBLAS_NUM_THREADS="1"))


def main(socket: str, *argv: str) -> int:
    server.serve = partial(server.serve, engine_command=Forks(socket).command("pdserve.engine"))
    return pdserve(argv)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
