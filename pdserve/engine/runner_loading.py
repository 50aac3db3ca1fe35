"""One rank's model runner, made in the same way on every rank."""

from __future__ import annotations

from pathlib import Path

from pdserve.config import EngineConfig
from pdserve.models.decoder_config import DecoderConfig
from pdserve.models.runner import ModelRunner
from pdserve.models.tensor_parallel import TpGroup


def load_runner(
    config: EngineConfig, decoder: DecoderConfig, num_blocks: int, max_model_len: int, tp: TpGroup
) -> ModelRunner:
    """Raises ModelError if the folder does not hold the model, or it cannot be split over the ranks."""
    folder, block_size = Path(config.model_dir), config.cache.block_size
    return ModelRunner(folder, decoder, config.model.dtype, block_size, num_blocks, max_model_len, tp)
