"""Says which files of a folder hold a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

from pdserve.errors import ModelError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SUFFIX = ".safetensors"
PLAIN_FORMATS = frozenset({"F64", "F32", "F16", "BF16"})
"""The number formats of weights that are not quantised, as safetensors files name them."""
WHOLE_FORMATS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
"""Those of masks and counters, which are no weights."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model folder: those of its index, or ``model.safetensors``, or all.

    Those of an index may be missing. Raises ModelError.
    """
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            outside = any(Path(name).name != name for name in names)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
            raise ModelError(f"{index} cannot be read: {exc}") from exc
        if outside:
            raise ModelError(f"{index} names files outside its folder")
        return [folder / name for name in names]
    if (whole := folder / WHOLE).exists():
        # Some folders have the same weights once more, in a file and with names that are for another program.
        return [whole]
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise ModelError(f"{folder} has no {SUFFIX} files")
    return files
