"""What starts processes of a cluster as forks of one that has loaded their modules, once in a run of the tests.

A node that starts by itself takes two seconds of a core, most of them to load modules. The shared clusters of
``pdserve.serve``, those of models with latents, experts or states, most tests of faults, and those of hosts and of the
command line start processes as users do: what a start needs is not there already.
"""

from __future__ import annotations

import atexit
import os
from contextlib import AbstractContextManager, ExitStack
from functools import cache

from tests.forks import Forks, forks_of

NODE = "tests.cluster.forked_node"
_SOCKET = "TESTS_PROCESS_FORKS"
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


def forks_for_all(stack: ExitStack) -> None:
    """Has all processes of ``pytest -n`` share what ``forks`` returns, until ``stack`` is closed."""
    os.environ[_SOCKET] = stack.enter_context(_started()).socket


@cache
def forks() -> Forks:
    """Returns what starts processes as forks. It ends with the tests."""
    if _SOCKET in os.environ:
        return Forks(os.environ[_SOCKET])
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(_started())


def _started() -> AbstractContextManager[Forks]:
    # A fork has no threads of numpy's.
    return forks_of(*_LOADED, OPENBLAS_NUM_THREADS="1")
