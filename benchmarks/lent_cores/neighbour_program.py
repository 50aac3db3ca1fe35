"""The engine whose cores are borrowed: ``neighbour_program LEDGER CACHE CORES``.

Each line of standard input is answered with a line: ``sleep``; ``step``, which begins one; or ``work``, which wakes up,
computes a little, and answers with the time that this has taken, in seconds. It has only its own cores for that: a core
of another engine ends it, because times with more cores mean something else. The end of standard input ends it, too.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.machine.core_ledger import CoreLedger

if TYPE_CHECKING:
    import torch

    from pdserve_kernels.contract import Linear

LAYERS, WIDTH = 4, 1024


def main(path: str, cache: str, owned: str) -> None:
    own = [int(core) for core in owned.split(",")]
    os.sched_setaffinity(0, own)
    # Torch sizes its thread pool by the cores that it sees.
    import torch

    from pdserve_kernels.cpu.compiled_kernels import CompiledKernels

    torch.set_num_threads(len(own))
    kernels = CompiledKernels(Path(cache))
    linears = [kernels.linear(torch.randn(WIDTH, WIDTH)) for _ in range(LAYERS)]
    with CoreLedger(Path(path)) as ledger:
        engine = ledger.join(lambda dead: kernels.forget_engine(ledger.words, dead))
        cores = kernels.lent_cores(ledger.words, engine, own)
        print("ready", flush=True)
        for line in sys.stdin:
            answer = 0.0
            match line.strip():
                case "sleep":
                    cores.sleep()
                case "step":
                    cores.begin_step()
                case "work":
                    begin = time.perf_counter()
                    cores.begin_step()
                    _compute(linears, torch.ones(1, WIDTH))
                    answer = time.perf_counter() - begin
                    if cores.borrowed:
                        sys.exit("the engine whose cores are borrowed has borrowed some itself")
            print(answer, flush=True)
        cores.close()


def _compute(linears: list[Linear], x: torch.Tensor) -> None:
    for linear in linears:
        x = linear(x)


if __name__ == "__main__":
    main(*sys.argv[1:])
