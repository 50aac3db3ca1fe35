"""What a runner needs of a model, whatever its architecture, and which architecture a folder holds."""

from __future__ import annotations

from typing import Protocol

import torch

from pdserve.models.decoder_config import DecoderConfig
from pdserve.models.layers import Building
from pdserve.models.llama import LlamaDecoder
from pdserve_kernels.contract import Attention


class Decoder(Protocol):
    """Token ids and positions in, hidden states out; ``logits`` for the rows that need them."""

    @property
    def capturable(self) -> bool:
        """Whether the same operations are done whatever the inputs hold, so that a recorded step may be replayed."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """``[tokens]`` ids and positions to ``[tokens, hidden_size]``, before the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden_size]`` to fp32 ``[rows, vocab_size]``."""


def build_decoder(config: DecoderConfig, building: Building, max_positions: int, dtype: torch.dtype) -> Decoder:
    """This rank's part of the model, with a position table for ``max_positions``.

    Raises ModelError if the checkpoint lacks a tensor, has one too many, or cannot be split over the ranks.
    """
    return LlamaDecoder(config, building, max_positions, dtype)
