"""What an engine started from here would tell its peers in the handshake."""

from __future__ import annotations

from pathlib import Path

from pdserve.compiled_library import can_be_built
from pdserve.config import CacheConfig, CpuKernels, ModelConfig
from pdserve.models.backend import choose_device
from pdserve.models.checkpoint.decoder_config import read_decoder_config
from pdserve.models.checkpoint.demo import resolve_model
from pdserve.models.checkpoint.fingerprint import fingerprint
from pdserve.models.checkpoint.kept_blocks import keeps_blocks
from pdserve.wire.transfer import EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
from pdserve_kernels.cpu.library import CPU_KERNELS


def local_spec(model: ModelConfig, cache: CacheConfig, kernels: CpuKernels, cache_dir: Path) -> EngineSpec:
    """Returns the specification of one rank. ``cache_dir`` has the digests of weights.

    Raises ModelError if there is no such model, and ConfigError if its device is not there.
    """
    folder = resolve_model(model.path)
    decoder = read_decoder_config(folder)
    on_cpu = choose_device(model.device).type == "cpu"
    compiled = on_cpu and kernels is not CpuKernels.TORCH and can_be_built(CPU_KERNELS)
    return EngineSpec(
        protocol=PROTOCOL_VERSION,
        oldest_protocol=OLDEST_PROTOCOL,
        fingerprint=fingerprint(folder, cache_dir, in_blocks=keeps_blocks(folder, model, kernels=compiled)),
        dtype=model.dtype.short,
        block_size=cache.block_size,
        num_layers=decoder.num_layers,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        tp_size=1,
    )
