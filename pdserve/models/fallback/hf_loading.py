"""Loads the models that transformers computes, in the numbers in which they are served."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._meta_registrations  # see lean_torch: transformers' models need it, and it has to come before them
from transformers import PretrainedConfig, PreTrainedModel

from pdserve.errors import ModelError
from pdserve.models.backend import CPU
from pdserve.models.checkpoint.safetensors.files import SafetensorsFiles
from pdserve.models.checkpoint.weights import unknown_tensors

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
