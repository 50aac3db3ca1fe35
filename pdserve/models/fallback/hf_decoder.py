"""Loads and computes any decoder that transformers has, with paged attention in place of its own.

Models that follow transformers' attention interface look their attention function up by name and pass it all keyword
arguments of their call. The function that is registered here finds the step's attention among them.

The tokens of a step run as one row, ``[1, tokens]``, with their positions given; everything but attention works
token by token, and attention knows which tokens belong together. ``hf_check`` tries out whether that is true of a
model.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._meta_registrations  # see lean_torch: it has to come before transformers' models
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from pdserve.errors import ModelError
from pdserve.models.backend import CPU
from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.checkpoint.safetensors.files import SafetensorsFiles
from pdserve.models.checkpoint.weights import unknown_tensors
from pdserve.models.rank_cache import StepCache
from pdserve_kernels.contract import Attention

PAGED_ATTENTION = "pdserve_paged"
STEP_KEYWORD = "paged_step"
"""The keyword argument that carries a ``PagedStep`` through a model's forward."""

WITHOUT_MEANING_HERE = {
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "position_bias": "biases by position",
    "alibi": "biases by position",
    "head_mask": "masked heads",
    "indices": "sparse attention",
}
"""The arguments by which a model changes its attention in ways that paged attention does not compute."""


class PagedStep:
    """One step's attention. It notes which layers have used it, and with which windows."""

    def __init__(self, attention: Attention, heads: int, kv_heads: int, head_dim: int, scale: float) -> None:
        """Wraps ``attention``, which multiplies scores by ``scale``."""
        self._attention = attention
        self._query = (heads, head_dim)
        self._key_value = (kv_heads, head_dim)
        self._scale = scale
        self.layers: set[int] = set()
        self.windows: set[int] = set()

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Maps query, key and value, all ``[1, heads, tokens, head_dim]``, to ``[1, tokens, heads, head_dim]``.

        Raises ModelError if the module does not fit the configuration.
        """
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            raise ModelError(f"its attention modules have no layer_idx of their own: {layer}")
        self.layers.add(layer)
        if window is not None:
            self.windows.add(window)
        for name, tensor, wanted in (
            ("query", query, self._query),
            ("key", key, self._key_value),
            ("value", value, self._key_value),
        ):
            if (tensor.shape[1], tensor.shape[3]) != wanted:
                found = f"{tensor.shape[1]} {name} heads of {tensor.shape[3]}"
                raise ModelError(f"layer {layer} has {found}, and its configuration says {wanted[0]} of {wanted[1]}")
        if scaling is not None and scaling != self._scale:
            query = query * (scaling / self._scale)
        key_value = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)))
        return self._attention(layer, query[0].transpose(0, 1).contiguous(), key_value, window).unsqueeze(0)


def register_paged_attention() -> None:
    """Makes ``PAGED_ATTENTION`` an attention implementation that models can be loaded with or switched to."""
    AttentionInterface.register(PAGED_ATTENTION, _attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    step = others.get(STEP_KEYWORD)
    if not isinstance(step, PagedStep):
        raise ModelError("it does not pass its arguments on to its attention")
    if attention_mask is not None:
        raise ModelError("it makes attention masks of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError("it has attention that looks ahead")
    if used := [f"{words} ({name})" for name, words in WITHOUT_MEANING_HERE.items() if others.get(name) is not None]:
        raise ModelError(f"it has {', '.join(used)}")
    return step.attend(module, query, key, value, scaling, sliding_window), None


class HfDecoder:
    """Satisfies ``decoder.Decoder``."""

    capturable = False
    drafter = None

    def __init__(self, config: DecoderConfig, model: PreTrainedModel) -> None:
        """Switches ``model`` to paged attention. Raises ModelError if that cannot be done."""
        base = model.base_model
        if base is model:
            raise ModelError(f"a {config.family} model has no head apart from its layers")
        register_paged_attention()
        model.set_attn_implementation(PAGED_ATTENTION)
        if model.config._attn_implementation != PAGED_ATTENTION:
            raise ModelError(f"a {config.family} model does not follow transformers' attention interface")
        self._config = config
        self._base: Any = base
        self._tail: Any = _without_layers(model)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: StepCache) -> torch.Tensor:
        (attention,) = cache.attention
        return self.compute(token_ids, positions, self.step(attention))

    def step(self, attention: Attention) -> PagedStep:
        config = self._config
        return PagedStep(attention, config.heads, config.kv_heads, config.head_dim, config.attention_scale)

    def compute(self, token_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """Does what ``forward`` does, with the attention wrapped in a ``PagedStep``."""
        output = self._base(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            **{STEP_KEYWORD: step},
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._tail(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()


@dataclass
class _HiddenStates(MoeModelOutputWithPast):
    """The output of the layers, with every field that heads of causal models read."""

    cross_attentions: None = None


class _Passed(torch.nn.Module):
    """Takes the place of the layers, and returns its input embeddings as hidden states."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _HiddenStates:
        return _HiddenStates(last_hidden_state=inputs_embeds)


def _without_layers(model: PreTrainedModel) -> torch.nn.Module:
    """Returns the part of the model from hidden states to logits, with every factor, cap or bias that it applies."""
    tail = copy.copy(model)
    tail.__dict__["_modules"] = dict(model._modules) | {model.base_model_prefix: _Passed()}
    return tail


MASKED_SCORE = "attn.masked_bias"
"""The last part of a name in older exports: the score of masked tokens, a constant which no model reads any more."""


class _Unread(torch.Tensor):
    """Has the shape of a tensor on disk, and no memory, wherever transformers would put it."""

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        return self


def check_tensors(folder: Path, hf: PretrainedConfig) -> None:
    """Raises ModelError if a tensor in ``folder`` is missing, would stay unread, or has another shape. Reads none.

    transformers renames and joins tensors, and knows which it may leave unread. So it loads a model whose tensors have
    their shapes alone.
    """
    files = SafetensorsFiles(folder)
    files.check_formats()
    shapes = {name: torch.empty(files.shape(name), device="meta").as_subclass(_Unread) for name in files.names()}
    transformers: Any = importlib.import_module("transformers")
    architecture = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)]
    with _loading(folder):
        _, report = architecture.from_pretrained(
            None,
            config=copy.deepcopy(hf),
            state_dict=shapes,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    _check_report(folder, report)


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Raises ModelError for whatever transformers' code raises: models look up and divide settings of any kind."""
    try:
        yield
    except Exception as exc:
        raise ModelError(f"transformers cannot load {folder}: {type(exc).__name__}: {exc}") from exc


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    """Raises ModelError for what transformers made up, because it was missing, or left unread."""
    if lacking := sorted({str(name) for kind in ("missing_keys", "mismatched_keys") for name in report[kind]}):
        raise ModelError(f"{folder} lacks tensors, or has them in another shape: {', '.join(lacking[:5])}")
    if unread := [name for name in report["unexpected_keys"] if not name.endswith(MASKED_SCORE)]:
        raise ModelError(unknown_tensors(folder, unread))


def load_hf_model(
    folder: Path, hf: PretrainedConfig, dtype: torch.dtype, device: torch.device = CPU
) -> PreTrainedModel:
    """Returns the model in ``folder`` with transformers' eager attention. Code in the folder is never run.

    transformers puts each tensor into ``dtype`` when it reads it, and the whole model then goes to ``device``: to read
    it straight to a GPU, transformers needs another package.

    Raises ModelError if transformers cannot load the model, or a tensor is missing or unread.
    """
    transformers: Any = importlib.import_module("transformers")
    with _loading(folder):
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
    _check_report(folder, report)
    loaded: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return loaded


def with_other_settings(model: PreTrainedModel, hf: PretrainedConfig) -> PreTrainedModel:
    """Returns a model of the settings ``hf`` in fp32, with eager attention and the weights and buffers of ``model``.

    Both have the same tensors: none is copied. Raises ModelError if the settings make another model.
    """
    transformers: Any = importlib.import_module("transformers")
    try:
        with torch.device("meta"):
            other = transformers.AutoModelForCausalLM.from_config(hf, dtype=torch.float32, attn_implementation="eager")
    except Exception as exc:
        raise ModelError(f"transformers cannot build a {hf.model_type} model: {type(exc).__name__}: {exc}") from exc
    _share(model, other)
    built: PreTrainedModel = other.eval()
    return built


def _share(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Gives ``target`` the tensors of ``source``, and the modules in it that are of other kinds."""
    if source._modules.keys() != target._modules.keys():
        raise ModelError(f"the parts of a {type(source).__name__} depend on its settings")
    target._parameters, target._buffers = source._parameters, source._buffers
    vars(target).update({name: value for name, value in vars(source).items() if isinstance(value, torch.Tensor)})
    for name, child in source._modules.items():
        own = target._modules[name]
        if child is None or own is None or type(child) is not type(own):
            target._modules[name] = child
        else:
            _share(child, own)
