"""The prefill process of the benchmark: ``python -m pdserve.bench.transfer.prefill_program CORE``.

Each line of standard input is an ``Assignment``, which replaces the one before it and is answered with a ``Serving``.
The end of standard input ends the process.
"""

from __future__ import annotations

import math
import os
import select
import sys
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pdserve.bench.transfer.bench_engines import PushingEngine


def main(core: int) -> None:
    os.sched_setaffinity(0, {core})
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    orders = sys.stdin.fileno()
    poll = select.poll()
    for descriptor in (bell, orders):
        poll.register(descriptor, select.POLLIN)
    engine: PushingEngine | None = None
    try:
        while True:
            due_s = None if engine is None else engine.turn()
            ready = dict(poll.poll(None if due_s is None else math.ceil(due_s * 1000)))
            if bell in ready:
                os.eventfd_read(bell)
            if orders in ready:
                # An assignment is one write, and is answered before the next one comes, so one line is all there is to
                # read.
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                if engine is not None:
                    engine.close()
                engine = _engine(line, bell)
    finally:
        if engine is not None:
            engine.close()
        os.close(bell)


def _engine(line: bytes, bell: int) -> PushingEngine:
    # This import loads torch, which sizes its thread pool by the cores that it sees, so it has to come after pinning.
    from pdserve.bench.transfer.bench_engines import Assignment, PushingEngine

    engine = PushingEngine(msgspec.json.decode(line, type=Assignment), lambda: os.eventfd_write(bell, 1))
    sys.stdout.buffer.write(msgspec.json.encode(engine.serving) + b"\n")
    sys.stdout.buffer.flush()
    return engine


if __name__ == "__main__":
    main(int(sys.argv[1]))
