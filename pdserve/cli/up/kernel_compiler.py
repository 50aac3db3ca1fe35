"""Compiles the CPU kernels in a process beside ``pdserve up``, which starts nodes.

Each engine would compile them otherwise, on its own cores alone, while the others wait for it. If this process fails,
the engines still do, and say why.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pdserve.compiled_library import BuildError, CompilerWatch, Compiling, built_library, needs_compiling
from pdserve.config import CpuKernels, Device, NodeConfig
from pdserve.machine.core_share import NVIDIA_DRIVER
from pdserve.process import ChildProcess, die_with_parent, python_program
from pdserve_kernels.cpu.library import CPU_KERNELS


@contextmanager
def compiling_kernels(node: NodeConfig, cache_dir: Path) -> Iterator[Callable[[], Compiling | None]]:
    """Compiles within the block, if nodes with these settings need it. What has not ended with the block is killed.

    Yields a function that returns how far the compiler is; None when nothing is compiled, or if that is not known.
    """
    if not computes_on_cpu(node) or not needs_compiling(CPU_KERNELS, cache_dir):
        yield nothing_compiled
        return
    progress: Callable[[], Compiling | None] = nothing_compiled
    # A failing compiler is the engines' to report: they may do without.
    with suppress(BuildError):
        progress = CompilerWatch(CPU_KERNELS, cache_dir).look
    command = python_program("pdserve.cli.up.kernel_compiler", str(cache_dir))
    child = ChildProcess("kernel compiler", command, stderr=subprocess.DEVNULL, own_session=True)
    over = os.eventfd(0, os.EFD_CLOEXEC)
    # A thread waits for the child, so that it does not stay as a zombie for as long as the cluster serves.
    waiting = threading.Thread(target=_reap_first, args=(child, over), name="kernel compiler", daemon=True)
    waiting.start()
    try:
        yield progress
    finally:
        os.eventfd_write(over, 1)
        waiting.join()
        os.close(over)


def _reap_first(child: ChildProcess, over: int) -> None:
    """Waits until the child has ended or ``over`` is set, and then ends it."""
    poller = select.poll()
    poller.register(child.pidfd, select.POLLIN)
    poller.register(over, select.POLLIN)
    poller.poll()
    child.reap(0.0)


def nothing_compiled() -> Compiling | None:
    return None


def may_have_gpu(node: NodeConfig) -> bool:
    """Returns whether nodes may compute on a GPU, as far as this shows without loading torch."""
    return node.model.device is Device.CUDA or (node.model.device is Device.AUTO and NVIDIA_DRIVER.exists())


def computes_on_cpu(node: NodeConfig) -> bool:
    """Returns whether nodes need the compiled kernels, as far as this shows without loading torch."""
    return node.cpu.kernels is not CpuKernels.TORCH and not may_have_gpu(node)


def main(cache_dir: str) -> int:
    die_with_parent()
    try:
        built_library(CPU_KERNELS, Path(cache_dir))
    except BuildError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
