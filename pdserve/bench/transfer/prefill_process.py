"""The benchmark's handle of its prefill process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from pdserve.bench.transfer.bench_engines import thread_cpu_s
from pdserve.bench.transfer.messages import Assignment, Serving
from pdserve.process import AnsweringProcess, python_program
from pdserve.wire.ticket import PrefillTarget

_ANSWER_S = 120.0
_END_S = 10.0


class PrefillProcess:
    """The process of ``prefill_program``, which serves one assignment at a time."""

    def __init__(self, process: AnsweringProcess) -> None:
        self._process = process
        self._serving: Serving | None = None

    def assign(self, assignment: Assignment) -> PrefillTarget:
        """Returns the engine to fetch from. Raises ChildDied if the process does not answer."""
        self._serving = msgspec.json.decode(self._process.ask(assignment, _ANSWER_S), type=Serving)
        return PrefillTarget("prefill", self._serving.control, self._serving.boot_id)

    def cpu_s(self) -> float:
        """Returns the CPU time of its transfer thread so far. ``assign`` comes first."""
        assert self._serving is not None
        return thread_cpu_s(self._process.pid, self._serving.thread)


@contextmanager
def prefill_process(core: int, environ: Mapping[str, str]) -> Iterator[PrefillProcess]:
    """Yields a prefill process on ``core``, which runs until the block ends."""
    command = python_program("pdserve.bench.transfer.prefill_program", str(core))
    process = AnsweringProcess("the prefill process of the benchmark", command, environ)
    try:
        yield PrefillProcess(process)
    finally:
        process.reap(_END_S)
