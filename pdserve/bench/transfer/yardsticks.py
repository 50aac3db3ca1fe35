"""Measures other ways to move bytes between two processes: UCX's own benchmark, NIXL, and a copy in memory."""

from __future__ import annotations

import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pdserve.config import TransferConfig
from pdserve.config.bench import CacheMemory
from pdserve.doctor.ucx import PerftestKind, find_perftest
from pdserve.errors import BenchError, TransferError
from pdserve_kvtransfer.configuration import devices_of
from pdserve_kvtransfer.ucx.ucx_library import loaded_ucx
from pdserve_kvtransfer.ucx.ucx_transport import allowed_transports

_LEAST_MESSAGES = 200
_BYTES = 256 * 2**20
_MOST_MESSAGES = 20_000
_LIMIT_S = 60.0
_NIXL_LIMIT_S = 180.0
_NIXL_LINE = re.compile(
    rb"^nixl (?P<size>\d+) \d+ (?P<total>[\d.]+) GB/s total, (?P<moving>[\d.]+) xfer-only", re.MULTILINE
)
_COPIES = 7


@dataclass(frozen=True, slots=True)
class NixlRate:
    """Rates of NIXL, in bytes/s."""

    total: float
    """The rate that includes making the descriptors and the request, which each transfer needs anew."""
    moving: float


def perftest_bytes_per_s(
    config: TransferConfig,
    environ: Mapping[str, str],
    size: int,
    cores: tuple[int, int],
    *,
    survivable: bool,
    memory: CacheMemory = CacheMemory.HOST,
) -> float:
    """Returns the rate of ``ucx_perftest tag_bw`` with the transfer's settings. ``cores`` are for receiver and sender.

    Without ``survivable`` it may use what no transfer does: endpoints for peers that never die, such as a receiver
    that copies out of the sender's memory, and CUDA IPC. Raises BenchError or TransferError.
    """
    try:
        loaded = loaded_ucx()
    except TransferError as exc:
        raise BenchError(str(exc)) from exc
    perftest = find_perftest(loaded.prefix, loaded.folder)
    if perftest is None:
        raise BenchError(f"{loaded} came without ucx_perftest")
    settings = {**environ, "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_MM_ERROR_HANDLING": "y"}
    tls = config.ucx_tls or environ.get("UCX_TLS", "")
    own = {
        "UCX_TLS": allowed_transports(tls) if survivable else tls,
        "UCX_NET_DEVICES": devices_of(config),
        "UCX_TCP_PORT_RANGE": config.ucx_tcp_ports,
    }
    settings |= {name: value for name, value in own.items() if value}
    if config.ucx_rails:
        settings |= dict.fromkeys(("UCX_MAX_RNDV_RAILS", "UCX_MAX_EAGER_RAILS"), str(config.ucx_rails))
    count = min(max(_BYTES // size, _LEAST_MESSAGES), _MOST_MESSAGES)
    result = perftest.pair(
        settings,
        kind=PerftestKind.BANDWIDTH,
        size=size,
        count=count,
        timeout_s=_LIMIT_S,
        cores=cores,
        survivable=survivable,
        memory=memory.value,
    )
    return result.bytes_per_s


def nixl_rates(command: str, environ: Mapping[str, str]) -> dict[int, NixlRate]:
    """Returns the rates by block size. ``command`` prints lines like ``nixl 65536 2000 4.2 GB/s total, 5.0 xfer-only``.

    Raises BenchError.
    """
    settings = {**environ, "UCX_MM_ERROR_HANDLING": "y", "UCX_CMA_ERROR_HANDLING": "y"}
    try:
        done = subprocess.run(
            shlex.split(command),
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_NIXL_LIMIT_S,
            check=False,
        )
    except (OSError, ValueError) as exc:
        raise BenchError(f"--nixl-command cannot be run: {exc}") from exc
    except subprocess.TimeoutExpired as exc:
        raise BenchError(f"--nixl-command did not end within {_NIXL_LIMIT_S:g} s") from exc
    found = {
        int(line["size"]): NixlRate(float(line["total"]) * 1e9, float(line["moving"]) * 1e9)
        for line in _NIXL_LINE.finditer(done.stdout)
    }
    if not found:
        raise BenchError(f"--nixl-command printed no rate (exit status {done.returncode})")
    return found


def copy_bytes_per_s(mib: int) -> float:
    """Returns the rate of one core that copies between two buffers of ``mib`` MiB."""
    source = torch.ones(mib * 2**20, dtype=torch.uint8)
    into = torch.zeros_like(source)
    times = []
    for _ in range(_COPIES):
        started = time.perf_counter()
        into.copy_(source)
        times.append(time.perf_counter() - started)
    return source.nbytes / statistics.median(times)
