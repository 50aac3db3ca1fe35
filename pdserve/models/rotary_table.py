"""Cosines and sines of every position, with the scaling that the model's configuration asks for."""

from __future__ import annotations

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve.errors import ModelError
from pdserve.models.decoder_config import DecoderConfig

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Scalings whose table changes with the context length; a table made once would be wrong for them."""


def rotary_table(
    config: DecoderConfig, positions: int, dtype: torch.dtype, device: torch.device, layer_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(cos, sin)``, each ``[positions, head_dim / 2]``. Raises ModelError for an unsupported scaling.

    ``layer_type`` chooses among the tables of a model that has several.
    """
    parameters = config.hf.rope_parameters if layer_type is None else config.hf.rope_parameters[layer_type]
    kind = parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inverse, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    elif kind in LENGTH_DEPENDENT or kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"rotary scaling {kind!r} is not supported")
    else:
        inverse, scaling = ROPE_INIT_FUNCTIONS[kind](config.hf, torch.device("cpu"), layer_type=layer_type)
    if config.rotary_divisors:
        inverse = inverse / torch.tensor(config.rotary_divisors)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    return (angles.cos() * scaling).to(device, dtype), (angles.sin() * scaling).to(device, dtype)
