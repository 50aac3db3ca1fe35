"""Says which files of a folder hold a model's weights and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from pdserve.errors import ModelError

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
