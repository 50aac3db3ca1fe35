"""What an engine started from here would tell its peers in the handshake."""

from __future__ import annotations

from pathlib import Path

from pdserve.config import CacheConfig, ModelConfig
from pdserve.models.checkpoint.decoder_config import read_decoder_config
from pdserve.models.checkpoint.demo import resolve_model
from pdserve.models.checkpoint.weights import fingerprint
from pdserve.wire.transfer import EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION


def local_spec(model: ModelConfig, cache: CacheConfig, cache_dir: Path) -> EngineSpec:
    """Returns the specification of one rank. Raises ModelError if there is no such model."""
    folder = resolve_model(model.path, cache_dir)
    decoder = read_decoder_config(folder)
    return EngineSpec(
        protocol=PROTOCOL_VERSION,
        oldest_protocol=OLDEST_PROTOCOL,
        fingerprint=fingerprint(folder),
        dtype=model.dtype.value,
        block_size=cache.block_size,
        num_layers=decoder.num_layers,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        tp_size=1,
    )
