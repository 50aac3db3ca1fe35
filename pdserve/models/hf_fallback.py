"""Any decoder that transformers can compute, with paged attention in place of its own.

The tokens of a step run as one row, ``[1, tokens]``, with their positions given; everything but attention works
token by token, and attention knows which tokens belong together. Whether that is true of a model is not believed but
tried: see ``hf_check``.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from pdserve.errors import ModelError
from pdserve.models.decoder_config import DecoderConfig
from pdserve.models.hf_attention import NAME, STEP, PagedStep, register_paged_attention
from pdserve_kernels.contract import Attention


class HfDecoder:
    """Satisfies ``decoder.Decoder``."""

    capturable = False

    def __init__(self, config: DecoderConfig, model: PreTrainedModel) -> None:
        """``model`` is switched to paged attention. Raises ModelError if it cannot be."""
        base = model.base_model
        if base is model:
            raise ModelError(f"a {config.family} model has no head apart from its layers")
        register_paged_attention()
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ModelError(f"a {config.family} model does not follow transformers' attention interface")
        self._config = config
        self._base: Any = base
        self._tail: Any = _without_layers(model)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        return self.compute(token_ids, positions, self.step(attention))

    def step(self, attention: Attention) -> PagedStep:
        config = self._config
        return PagedStep(attention, config.heads, config.kv_heads, config.head_dim, config.attention_scale)

    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """``forward``, with the attention wrapped."""
        output = self._base(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **{STEP: step}
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._tail(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()


@dataclass
class _HiddenStates(MoeModelOutputWithPast):
    """All that the heads of causal models look for in what their layers return."""

    cross_attentions: None = None


class _Passed(torch.nn.Module):
    """Stands where the layers were: what comes in as embeddings goes out as hidden states."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _HiddenStates:
        return _HiddenStates(last_hidden_state=inputs_embeds)


def _without_layers(model: PreTrainedModel) -> torch.nn.Module:
    """The model's own way from hidden states to logits, whatever it multiplies, bends or adds there."""
    tail = copy.copy(model)
    tail.__dict__["_modules"] = dict(model._modules) | {model.base_model_prefix: _Passed()}
    return tail


def load_hf_model(folder: Path, hf: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model in ``folder`` with transformers' eager attention. Code that comes with it is never run.

    Raises ModelError if transformers cannot load it, or a tensor is missing.
    """
    transformers: Any = importlib.import_module("transformers")
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as exc:
        raise ModelError(f"transformers cannot load {folder}: {exc}") from exc
    # transformers fills what is missing with random numbers.
    if lacking := sorted({str(name) for kind in ("missing_keys", "mismatched_keys") for name in report[kind]}):
        raise ModelError(f"{folder} lacks tensors, or has them in another shape: {', '.join(lacking[:5])}")
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded
