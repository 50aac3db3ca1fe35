"""Another engine of the machine: ``python -m tests.kernels.core_neighbour LEDGER CORES``.

It does what each line of standard input says, and answers with a line: ``sleep``, ``step`` (it begins one),
``toggle N`` (so many times one after the other) or ``close``. The end of standard input kills it, as a crash would.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from pdserve.compiled_library import built_library
from pdserve.machine.core_ledger import CoreLedger
from pdserve.settings import cache_folder
from pdserve_kernels.cpu.library import CPU_KERNELS, LentCores, Library, forget_engine


def main(path: str, owned: str) -> None:
    # Torch would bring an OpenMP, and takes seconds to load.
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    library = Library(built_library(CPU_KERNELS, cache_folder(os.environ)))
    ledger = CoreLedger(Path(path))
    engine = ledger.join(lambda dead: forget_engine(library, ledger.words, dead))
    cores = LentCores(library, ledger.words, engine, [int(core) for core in owned.split(",") if core])
    print(engine, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["sleep"]:
                cores.sleep()
            case ["step"]:
                cores.begin_step()
            case ["toggle", times]:
                for _ in range(int(times)):
                    cores.begin_step()
                    cores.sleep()
            case ["close"]:
                cores.close()
                ledger.close()
        print(flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
