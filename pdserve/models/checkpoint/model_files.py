"""Says which files of a folder hold a model's weights and its tokenizer.

A folder of quantised weights whose method nobody here knows is refused. Their numbers mean nothing without the settings
and scales that belong to them. Read as they are, they would give a model that answers with nonsense and no error.
"""

from __future__ import annotations

import json
from collections.abc import Container
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


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model folder: those of its index, or ``model.safetensors``, or all.

    Those of an index may be missing. Raises ModelError.
    """
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            elsewhere = any(Path(name).name != name for name in names)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
            raise ModelError(f"{index} cannot be read: {exc}") from exc
        if elsewhere:
            raise ModelError(f"{index} names files outside its folder")
        return [folder / name for name in names]
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


class _QuantisationSettings(msgspec.Struct):
    """What a file may say of quantisation. ``text_config`` is the text part of a model that takes images, too."""

    quantization_config: dict[str, object] | None = None
    compression_config: dict[str, object] | None = None
    """What files of 2024 call it."""
    text_config: _QuantisationSettings | None = None
    quantization: dict[str, object] | None = None
    """What ``hf_quant_config.json`` calls it."""


def refuse_unknown_quantisation(folder: Path, known: Container[object] = ()) -> None:
    """Raises ModelError if the folder's weights are quantised by a method that is not among ``known``."""
    for file in ("config.json", "hf_quant_config.json"):
        path = folder / file
        try:
            said = msgspec.json.decode(plain_json(path.read_bytes()), type=_QuantisationSettings)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as exc:
            raise ModelError(f"{path} cannot be read: {exc}") from exc
        text = said.text_config or _QuantisationSettings()
        for settings in (said, text):
            own = settings.quantization_config or settings.compression_config
            if own and own.get("quant_method") not in known:
                raise ModelError(_refusal(path, own))
        if said.quantization and said.quantization.get("quant_algo"):
            raise ModelError(_refusal(path, {"quant_method": "modelopt"} | said.quantization))


def _refusal(path: Path, settings: dict[str, object]) -> str:
    method, algorithm = (settings.get(name) for name in ("quant_method", "quant_algo"))
    words = f"{method or 'without a quant_method'}" + (f", {algorithm}" if algorithm else "")
    return (
        f"the weights in {path.parent} are quantised ({path.name}: {words}), and such weights are not read here; "
        "a folder with bf16 weights or a GGUF file would be"
    )
