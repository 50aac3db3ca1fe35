"""Which kernel set an engine runs with."""

from __future__ import annotations

import logging
from pathlib import Path

from pdserve.compiled_library import BuildError
from pdserve.config import CpuKernels
from pdserve.errors import ConfigError
from pdserve_kernels.contract import Kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels

log = logging.getLogger(__name__)


def cpu_kernels(choice: CpuKernels, cache_dir: Path) -> Kernels:
    """The chosen set; compiled now, in about ten seconds, if it is not below ``cache_dir`` yet.

    Raises ConfigError if the compiled set was asked for by name and cannot be had; if it is only the better one, the
    log says so.
    """
    if choice is CpuKernels.TORCH:
        return TorchKernels()
    try:
        return CompiledKernels(cache_dir)
    except BuildError as exc:
        if choice is CpuKernels.COMPILED:
            raise ConfigError(f"--cpu-kernels compiled: {exc}") from exc
        log.warning("the plain torch kernels run instead of the compiled ones, which are faster: %s", exc)
        return TorchKernels()
