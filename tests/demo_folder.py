"""Makes a normal Hugging Face folder of the demo model, in bf16, for what reads no GGUF file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import save_file

from pdserve.models.checkpoint.cached_tokenizer import gguf_tokenizer
from pdserve.models.checkpoint.gguf.file import read_gguf
from pdserve.models.checkpoint.gguf.settings import gguf_settings
from pdserve.models.checkpoint.gguf.tensors import GgufTensors
from pdserve.models.checkpoint.model_files import DEMO_NAME, PACKAGE, packaged_gguf

# This is part of the folder's name. Raise it when the conversion changes, so that older folders are not used any more.
_CONVERSION = 2
_LOCK_TIMEOUT_S = 300.0
_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)
"""The settings of the GGUF file that the folder's ``config.json`` gets as they are."""


def demo_folder(cache_dir: Path) -> Path:
    """Returns the folder below ``cache_dir``. The first call makes it, in about 8 s.

    Several processes may call this at the same time. Raises ModelError if the demo model's package is missing.
    """
    gguf = packaged_gguf()
    version = importlib.metadata.version(PACKAGE)
    target = cache_dir / f"{DEMO_NAME}-{version}-{_CONVERSION}"
    if (target / "config.json").is_file():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    # The kernel frees the lock when the process ends: a converter that was killed blocks no other.
    with FileLock(target.with_name(f".{target.name}.lock"), timeout=_LOCK_TIMEOUT_S):
        if not (target / "config.json").is_file():
            _convert(gguf, target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _save(gguf, draft)
        draft.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        os.rename(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _save(gguf: Path, folder: Path) -> None:
    tokenizer = gguf_tokenizer(gguf)
    tokenizer.save_pretrained(folder)
    tensors = GgufTensors(gguf)
    whole = slice(None)
    weights = {name: tensors.read(name, whole, whole, torch.bfloat16) for name in tensors.names()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    family, settings = gguf_settings(read_gguf(gguf))
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = {
        "model_type": family,
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rotary().theta},
        **{name: getattr(settings, name) for name in _SETTINGS},
        **special,
    }
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
