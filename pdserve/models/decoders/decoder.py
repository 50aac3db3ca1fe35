"""Says what a runner needs of a model of any architecture, and builds the decoder for a folder's model."""

from __future__ import annotations

from typing import Protocol

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FAMILIES, GEMMA3, MOE, DecoderConfig, FallbackConfig, FamilyConfig
from pdserve.models.decoders.gemma3 import Gemma3Decoder
from pdserve.models.decoders.layers import Building
from pdserve.models.decoders.llama import LlamaDecoder, dense
from pdserve.models.decoders.qwen3_moe import sparse_or_dense
from pdserve_kernels.contract import Attention


class Decoder(Protocol):
    """Maps token ids and positions to hidden states, and hidden states to logits for the rows that need them."""

    @property
    def capturable(self) -> bool:
        """Whether a step does the same operations for all inputs, so that a recorded one may be replayed."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Maps ids and positions, both ``[tokens]``, to ``[tokens, hidden_size]``, before the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps ``[rows, hidden_size]`` to fp32 ``[rows, vocab_size]``."""


def build_decoder(config: DecoderConfig, building: Building, max_positions: int, dtype: torch.dtype) -> Decoder:
    """Returns this rank's part of the model, for contexts of up to ``max_positions``.

    Raises ModelError if the checkpoint lacks a tensor, has one too many, or cannot be split over the ranks, or if it is
    a fallback model and paged attention would change its tokens.
    """
    match config:
        case FamilyConfig():
            building.checkpoint.check_formats()
            # Built without weights first: what is missing or unknown, or has another shape, shows before any is read.
            _own_decoder(config, building.unread(), 1, dtype)
            return _own_decoder(config, building, max_positions, dtype)
        case FallbackConfig():
            return _fallback_decoder(config, building, dtype)
        case _:
            raise TypeError(f"{type(config).__name__} has no decoder")


def _fallback_decoder(config: FallbackConfig, building: Building, dtype: torch.dtype) -> Decoder:
    if building.tp.size > 1:
        raise ModelError(
            f"--tensor-parallel-size {building.tp.size} is for {sorted(FAMILIES)}; a {config.family} model has one rank"
        )
    if building.checkpoint.device.type != "cpu":
        raise ModelError(f"a {config.family} model is computed by transformers, on a CPU alone: --device cpu")
    # This import loads the parts of transformers that compute: about 2 s, and other families do not need them.
    from pdserve.models.decoders.hf_check import checked_hf_decoder

    return checked_hf_decoder(building.checkpoint.path, config, building.kernels, dtype)


def _own_decoder(config: FamilyConfig, building: Building, max_positions: int, dtype: torch.dtype) -> Decoder:
    if config.family in GEMMA3:
        return Gemma3Decoder(config, building, max_positions, dtype)
    feed_forward = sparse_or_dense if config.family in MOE else dense
    return LlamaDecoder(config, building, max_positions, dtype, feed_forward)
