"""Writes random models for studies: there are no small ones of some kinds, and times do not depend on the weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def write_checkpoint(model_type: str, shape: Mapping[str, object], folder: Path) -> None:
    """Writes a model of transformers' ``model_type`` in bf16, always the same one."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    settings = transformers.CONFIG_MAPPING[model_type](**shape)
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).save_pretrained(folder)
