"""Reads the tensors of a Hugging Face folder from its safetensors files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.model_files import INTEGER_FORMATS, PLAIN_FORMATS, weight_files
from pdserve.models.checkpoint.safetensors.dequantising import read_blocks, read_plain
from pdserve.models.checkpoint.safetensors.header import StoredTensor, read_header
from pdserve.models.checkpoint.safetensors.quantisation import FORMS, Quantisation
from pdserve.models.checkpoint.safetensors.quantised_tensors import BLOCKS, SCALES, quantised_tensors
from pdserve.models.checkpoint.weight_file import MappedFile
from pdserve_kernels.contract import BlockFormat, BlockWeight

log = logging.getLogger(__name__)

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
_PARTS = DTYPES | {"U32": torch.uint32, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
"""Those of the tensors that a quantised weight consists of."""


class SafetensorsFiles:
    """Satisfies ``weights.TensorFiles``."""

    def __init__(self, folder: Path, quantisation: Quantisation | None = None) -> None:
        """Takes how the weights are quantised. A quantised weight counts as one tensor.

        Raises ModelError if the folder has no readable safetensors files, or they do not fit what is said of them.
        """
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
        found = quantised_tensors(self._tensors, quantisation)
        self._quantised, self._unused = found.quantised, found.unused
        if self._unused:
            first = sorted(self._unused)[0]
            log.info(
                "%s: %d tensors such as %s are unused: activations are not rounded", folder, len(self._unused), first
            )

    def names(self) -> Iterable[str]:
        parts = self._parts()
        return [*(name for name in self._tensors if name not in parts), *self._quantised]

    def _parts(self) -> frozenset[str]:
        return self._unused.union(*(tensor.parts for tensor in self._quantised.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``weights.TensorFiles``."""
        return self._quantised[name].stored_shape if name in self._quantised else self._tensors[name].shape

    def nbytes(self, name: str) -> int:
        """See ``weights.TensorFiles``."""
        return self._quantised[name].nbytes if name in self._quantised else self._tensors[name].nbytes

    def block_formats(self, *, on_gpu: bool) -> dict[str, BlockFormat]:
        """Returns the format of each weight that ``read_blocks`` reads as a whole, if that is near enough."""
        found = {name: FORMS[tensor.form].on(gpu=on_gpu).blocks for name, tensor in self._quantised.items()}
        return {name: BlockFormat[blocks] for name, blocks in found.items() if blocks}

    def check_formats(self) -> None:
        """Refuses numbers of which nobody has said how they were quantised. Masks and counters are no weights."""
        for name, quantised in self._quantised.items():
            if (
                quantised.extent
                and (found := tuple(self._load(quantised.extent).flatten().tolist())) != quantised.shape
            ):
                raise ModelError(f"{quantised.extent!r} says {list(found)}, and {name!r} has {list(quantised.shape)}")
        parts = self._parts()
        for name, tensor in self._tensors.items():
            form = tensor.form
            if name in parts or form in PLAIN_FORMATS or (form in INTEGER_FORMATS and not name.endswith("weight")):
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
        if name in self._quantised:
            both = self._quantised[name]
            for index, each in enumerate(names):
                self._quantised[each] = both.expert(each + BLOCKS, each + SCALES)
                for part, own in ((both.codes, each + BLOCKS), (both.scales, each + SCALES)):
                    self._tensors[own], self._files[own] = self._tensors[part].part(index), self._files[part]
            return
        whole, mapped = self._tensors[name], self._files[name]
        for index, each in enumerate(names):
            self._tensors[each], self._files[each] = whole.part(index), mapped

    def read(self, name: str, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """See ``weights.TensorFiles``. What is not converted stays in the file until it is used."""
        if name in self._quantised:
            quantised = self._quantised[name]
            if quantised.turned:
                return read_plain(quantised, self._load, columns, rows, dtype).t()
            return read_plain(quantised, self._load, rows, columns, dtype)
        stored = self._tensors[name]
        whole = self._whole(name, DTYPES)
        if not stored.shape:
            return whole.to(dtype, copy=True)
        part = whole[rows]
        if columns != slice(None):
            # A copy of its own: the other columns need not be in memory beside it.
            part = part[:, columns].contiguous()
        return part.to(dtype)

    def read_blocks(
        self, name: str, rows: slice, columns: slice, *, turned: bool = False, on_gpu: bool = False
    ) -> BlockWeight | None:
        """See ``weights.TensorFiles``."""
        found = self._quantised.get(name)
        if found is None or found.turned != turned or len(found.shape) != 2:
            return None
        return read_blocks(found, self._load, rows, columns, on_gpu=on_gpu)

    def drop(self) -> None:
        """See ``weights.TensorFiles``."""
        for mapped in self._mapped:
            mapped.drop()

    def _load(self, name: str) -> torch.Tensor:
        return self._whole(name, _PARTS)

    def _whole(self, name: str, dtypes: Mapping[str, torch.dtype]) -> torch.Tensor:
        stored = self._tensors[name]
        dtype = dtypes.get(stored.form)
        if dtype is None:
            raise ModelError(f"tensor {name!r} in {self._folder} is in {stored.form}, which is not supported")
        mapped = self._files[name]
        mapped.read_ahead(stored.start, stored.nbytes)
        if stored.start % dtype.itemsize:
            bytes_of = mapped.tensor(torch.uint8, stored.start, stored.nbytes)
            return bytes_of.clone().view(dtype).view(stored.shape)
        return mapped.tensor(dtype, stored.start, stored.nbytes // dtype.itemsize).view(stored.shape)
