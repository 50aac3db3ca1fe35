"""The prefill process, as the benchmark sees it."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from pdserve.bench.transfer.bench_engines import thread_cpu_s
from pdserve.bench.transfer.messages import Assignment, Serving
from pdserve.errors import BenchError
from pdserve.wire.ticket import PrefillTarget

_ANSWER_S = 120.0
_END_S = 10.0


class PrefillProcess:
    """Serves one assignment at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._serving: Serving | None = None

    def assign(self, assignment: Assignment) -> PrefillTarget:
        """Whom to fetch from. Raises BenchError if the process does not answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(assignment) + b"\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise BenchError("the prefill process of the benchmark has ended") from exc
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            raise BenchError(f"the prefill process of the benchmark did not answer within {_ANSWER_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("the prefill process of the benchmark has ended")
        self._serving = msgspec.json.decode(line, type=Serving)
        return PrefillTarget("prefill", self._serving.control, self._serving.boot_id)

    def cpu_s(self) -> float:
        """CPU time of its transfer thread so far. ``assign`` comes first."""
        assert self._serving is not None
        return thread_cpu_s(self._process.pid, self._serving.thread)


@contextmanager
def prefill_process(core: int, environ: Mapping[str, str]) -> Iterator[PrefillProcess]:
    """Runs on ``core`` until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pdserve.bench.transfer.prefill_program", str(core)],
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield PrefillProcess(process)
    finally:
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
