"""A node under test, as tests see it: its URL, its process, and the messages that its engine received."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from pdserve.config import NodeConfig
from pdserve.wire.discovery import Role
from pdserve.wire.engine import Abort, Submit, ToEngine
from tests.eventually import eventually
from tests.forks import Forks, forks_of
from tests.processes import Process, clean_environ, running

MODEL = "scripted"
WAIT_S = 10.0
JOURNAL = "engine.journal"
_LOADED_LATER = ()


@dataclass(frozen=True)
class NodeUnderTest:
    process: Process
    url: str
    journal: Path

    def told(self) -> list[ToEngine]:
        """Returns every message that the engine has received so far."""
        if not self.journal.exists():
            return []
        *lines, _ = self.journal.read_bytes().split(b"\n")
        return [msgspec.json.decode(line, type=ToEngine) for line in lines]

    def submits(self) -> list[Submit]:
        return [message for message in self.told() if isinstance(message, Submit)]

    def aborted(self) -> set[int]:
        """Returns the local ids of the requests that were aborted."""
        return {i for message in self.told() if isinstance(message, Abort) for i in message.local_ids}

    @contextmanager
    def new_submits(self) -> Iterator[Callable[[], list[Submit]]]:
        """Yields a function that returns the submits since the beginning of the block."""
        before = len(self.submits())
        yield lambda: self.submits()[before:]

    def wait_aborted(self, count: int, since: int) -> None:
        """Waits until the ``count`` requests of the submits after the first ``since`` have all been aborted."""

        def done() -> bool:
            submits = self.submits()[since:]
            ids = {submit.local_id for submit in submits}
            ids |= {child.local_id for submit in submits for child in submit.children}
            return len(ids) == count and ids <= self.aborted()

        eventually(done)


@cache
def forks() -> Forks:
    """Returns what starts nodes and scripted engines as forks. It ends with the tests."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(forks_of("tests.api.scripted_node", "tests.api.scripted_engine", *_LOADED_LATER))


def node_command(
    config: NodeConfig, model_dir: Path, folder: Path, role: Role = Role.MIXED, *, forked: bool = True
) -> list[str]:
    """Returns the command of a node with a scripted engine, whose journal is in ``folder``.

    It is a fork, unless the test asks the system about the process.
    """
    given = role.value, msgspec.json.encode(config).decode(), str(model_dir), str(folder / JOURNAL)
    if forked:
        return forks().command("tests.api.scripted_node", *given, forks().socket)
    return [sys.executable, "-m", "tests.api.scripted_node", *given]


@contextmanager
def scripted_node(
    config: NodeConfig, model_dir: Path, folder: Path, role: Role = Role.MIXED, *, forked: bool = True
) -> Iterator[NodeUnderTest]:
    """Yields a running node, and ends it at the end of the block."""
    with running(node_command(config, model_dir, folder, role, forked=forked), clean_environ()) as process:
        yield NodeUnderTest(process, process.listening().url, folder / JOURNAL)
