"""Reads the tensors of a Hugging Face folder from its safetensors files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.mapped_file import MappedFile
from pdserve.models.checkpoint.model_files import INTEGER_FORMATS, PLAIN_FORMATS, weight_files
from pdserve.models.checkpoint.mxfp4 import BLOCKS, SCALES, Mxfp4Tensor, dequantised, mxfp4_pairs
from pdserve.models.checkpoint.safetensors_header import StoredTensor, read_header
from pdserve_kernels.contract import BlockWeight

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The number formats that are read."""


class SafetensorsFiles:
    """Satisfies ``weights.TensorFiles``."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the folder has no readable safetensors files."""
        self._files: dict[str, MappedFile] = {}
        self._tensors: dict[str, StoredTensor] = {}
        self._mapped: list[MappedFile] = []
        self._folder = folder
        for path in weight_files(folder):
            tensors = read_header(path)
            try:
                mapped = MappedFile(path)
            except (OSError, ValueError) as exc:
                raise ModelError(f"weights in {folder} cannot be read: {exc}") from exc
            self._mapped.append(mapped)
            self._tensors |= tensors
            self._files |= dict.fromkeys(tensors, mapped)
        self._mxfp4 = mxfp4_pairs(self._tensors)

    def names(self) -> Iterable[str]:
        parts = {stem + end for stem in self._mxfp4 for end in (BLOCKS, SCALES)}
        return [*(name for name in self._tensors if name not in parts), *self._mxfp4]

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``weights.TensorFiles``."""
        return self._found(name).shape

    def nbytes(self, name: str) -> int:
        """See ``weights.TensorFiles``."""
        return self._found(name).nbytes

    def _found(self, name: str) -> StoredTensor | Mxfp4Tensor:
        return self._mxfp4[name] if name in self._mxfp4 else self._tensors[name]

    def check_formats(self) -> None:
        """Refuses numbers of which nobody has said how they were quantised. Masks and counters are no weights."""
        for name, tensor in self._tensors.items():
            form = tensor.form
            if form in PLAIN_FORMATS or (form in INTEGER_FORMATS and not name.endswith("weight")):
                continue
            stem = name.removesuffix("weight")
            scales = (other for other in self._tensors if other.startswith(stem) and "scale" in other[len(stem) :])
            scale = next(scales, "")
            raise ModelError(
                f"the weights in {self._folder} are quantised, and nothing says how to read them: "
                f"tensor {name!r} is in {form}{f', with the scale {scale!r}' if scale else ''}. "
                f"Weights in safetensors files have to be in {', '.join(sorted(PLAIN_FORMATS))}"
            )

    def unstack(self, name: str, names: Iterable[str]) -> None:
        """See ``weights.TensorFiles``."""
        if name in self._mxfp4:
            both = self._mxfp4[name]
            for index, each in enumerate(names):
                part = self._mxfp4[each] = both.part(index)
                for end, stored in ((BLOCKS, part.blocks), (SCALES, part.scales)):
                    self._tensors[each + end], self._files[each + end] = stored, self._files[name + end]
            return
        whole, mapped = self._tensors[name], self._files[name]
        for index, each in enumerate(names):
            self._tensors[each], self._files[each] = whole.part(index), mapped

    def read(self, name: str, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """See ``weights.TensorFiles``. What is not converted stays in the file until it is used."""
        if name in self._mxfp4:
            # What is stored is [out, in].
            blocks, scales = (self._whole(name + end, self._tensors[name + end])[columns] for end in (BLOCKS, SCALES))
            return dequantised(blocks, scales).t()[rows].to(dtype)
        stored = self._tensors[name]
        whole = self._whole(name, stored)
        if not stored.shape:
            return whole.to(dtype, copy=True)
        part = whole[rows]
        if columns != slice(None):
            # A copy of its own: the other columns need not be in memory beside it.
            part = part[:, columns].contiguous()
        return part.to(dtype)

    def read_blocks(self, name: str, rows: slice, columns: slice) -> BlockWeight | None:
        """See ``weights.TensorFiles``."""
        return None

    def drop(self) -> None:
        """See ``weights.TensorFiles``."""
        for mapped in self._mapped:
            mapped.drop()

    def _whole(self, name: str, stored: StoredTensor) -> torch.Tensor:
        dtype = DTYPES.get(stored.form)
        if dtype is None:
            raise ModelError(f"tensor {name!r} in {self._folder} is in {stored.form}, which is not supported")
        mapped = self._files[name]
        mapped.read_ahead(stored.start, stored.nbytes)
        if stored.start % dtype.itemsize:
            bytes_of = mapped.tensor(torch.uint8, stored.start, stored.nbytes)
            return bytes_of.clone().view(dtype).view(stored.shape)
        return mapped.tensor(dtype, stored.start, stored.nbytes // dtype.itemsize).view(stored.shape)
