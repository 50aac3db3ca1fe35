"""Read safetensors checkpoints by tensor name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pdserve.errors import ModelError
from pdserve.models.backend import CPU

ALL = slice(None)
SAMPLES = 64
SAMPLE_BYTES = 65_536


class Checkpoint:
    """The tensors of a model folder, each taken exactly once so that nothing is forgotten."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> None:
        """Raises ModelError if the folder has no readable safetensors files."""
        self._dtype = dtype
        self.device = device
        self._folder = folder
        try:
            self._files: dict[Path, Any] = {path: safe_open(path, "pt") for path in weight_files(folder)}
        except (OSError, SafetensorError) as exc:
            raise ModelError(f"weights in {folder} cannot be read: {exc}") from exc
        self._where = {name: path for path, opened in self._files.items() for name in opened.keys()}  # noqa: SIM118  # not a dict

    def take(self, name: str, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """A tensor, or a part of it, in the dtype and on the device of this checkpoint; only that part is read.

        ``columns`` is for tensors of two dimensions. Raises ModelError if it is missing or was taken before.
        """
        tensor = self.take_optional(name, rows, columns)
        if tensor is None:
            raise ModelError(f"{self._folder} has no tensor {name!r}")
        return tensor

    def take_optional(self, name: str, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor | None:
        path = self._where.pop(name, None)
        if path is None:
            return None
        try:
            stored = self._files[path].get_slice(name)
            tensor: torch.Tensor = stored[rows] if columns == ALL else stored[rows, columns]
        except SafetensorError as exc:
            raise ModelError(f"tensor {name!r} of {path} cannot be read: {exc}") from exc
        return tensor.to(self.device, self._dtype)

    def drop(self, name: str) -> None:
        """Leave a tensor unread that the model does not need."""
        self._where.pop(name, None)

    def check_all_taken(self) -> None:
        """Raises ModelError if the checkpoint holds tensors that the model did not ask for."""
        if self._where:
            some = ", ".join(sorted(self._where)[:5])
            raise ModelError(f"{self._folder} has {len(self._where)} tensors that this architecture lacks: {some}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by its index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError) as exc:
            raise ModelError(f"{index} cannot be read: {exc}") from exc
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index} names files outside its folder")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no .safetensors files")
    return files


def fingerprint(folder: Path) -> str:
    """Digest of the configuration and weights: equal folders have equal ones, other fine-tunes have others.

    Weights are sampled (their headers, and 64 evenly spaced parts of each file), so that a model of any size is
    fingerprinted in about a second.
    """
    digest = hashlib.sha256()
    try:
        config = json.loads((folder / "config.json").read_text())
        for volatile in ("_name_or_path", "_model_name_or_path", "transformers_version"):
            config.pop(volatile, None)
        digest.update(json.dumps(config, sort_keys=True).encode())
        for path in weight_files(folder):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                header = file.read(8)
                digest.update(file.read(int.from_bytes(header, "little")))
                for i in range(SAMPLES):
                    file.seek(max(0, (size - SAMPLE_BYTES) * i // (SAMPLES - 1)))
                    digest.update(file.read(SAMPLE_BYTES))
    except (OSError, ValueError) as exc:
        raise ModelError(f"{folder} cannot be fingerprinted: {exc}") from exc
    return digest.hexdigest()
