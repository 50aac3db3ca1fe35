"""Finds the quantised weights among the tensors of safetensors files: each is several tensors, by their names.

    NAME.weight          FP8 or int8, with NAME.weight_scale, NAME.weight_scale_inv or NAME.scale
    NAME.weight          DeepSeek V4: MXFP4 as bytes of two numbers, with NAME.scale
    NAME.weight_packed   compressed-tensors: 32-bit words along the inputs, or bytes of two numbers (NVFP4, MXFP4)
    NAME.qweight         GPTQ: 32-bit words along the inputs [in, out]; AWQ: along the outputs
    NAME.weight          MLX: 32-bit words along the inputs, with NAME.scales and NAME.biases
    NAME_blocks          gpt-oss: MXFP4 of stacked experts, with NAME_scales

What the configuration says has to fit what is there; a misfit is refused by the names of both. Only headers are read,
and nothing here loads torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pdserve.errors import ModelError
from pdserve.models.checkpoint.safetensors.header import StoredTensor
from pdserve.models.checkpoint.safetensors.quantisation import (
    BLOCK_INPUTS,
    FORMS,
    UNUSED,
    Form,
    Quantisation,
    Scheme,
    is_pattern,
)

WEIGHT = ".weight"
BLOCKS, SCALES = "_blocks", "_scales"
NVFP4_GROUP, MXFP4_GROUP = 16, 32
_MXFP4_BYTES = MXFP4_GROUP // 2
FP8 = "F8_E4M3"
SCALE_FORMATS = frozenset({"F32", "F16", "BF16", "F8_E8M0"})


class Packing(enum.Enum):
    """Where the numbers of a weight lie."""

    PLAIN = enum.auto()
    """One after another, in a number format of safetensors."""
    WORDS = enum.auto()
    """In words of 32 bits along the inputs, lowest bits first."""
    GPTQ = enum.auto()
    """As ``WORDS``, and the weight lies as ``[in, out]``."""
    AWQ = enum.auto()
    """In words of 32 bits along the outputs, in an order of its own; the weight lies as ``[in, out]``."""
    HALVES = enum.auto()
    """Two numbers of 4 bits in a byte, lower bits first, that are places in the table of e2m1."""


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A weight ``[out, in]`` that is several tensors of the files, which have these names."""

    form: Form
    packing: Packing
    shape: tuple[int, ...]
    """``[out, in]``, with the experts before if there are stacked ones."""
    codes: str
    scales: str
    grid: tuple[int, int]
    """The rows and columns that have one scale."""
    nbytes: int
    bits: int = 8
    zeros: str = ""
    """The tensor of zeros; without one, the zero of unsigned numbers is in their middle."""
    first_zero: int = 0
    """What is added to stored zeros."""
    offsets: str = ""
    """The tensor of offsets in the unit of the weight, which is in place of zeros."""
    order: str = ""
    """The tensor that says which group each input belongs to."""
    factor: str = ""
    """The tensor of one factor of all scales."""
    extent: str = ""
    """The tensor that has the shape of the weight."""
    divides: bool = False
    """Whether the factor divides them."""
    turned: bool = False
    """Whether the weight counts as stored ``[in, out]``, as gpt-oss has its experts."""

    @property
    def parts(self) -> tuple[str, ...]:
        scaling = (self.scales, self.zeros, self.offsets, self.factor)
        return tuple(filter(None, (self.codes, *scaling, self.order, self.extent)))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the configuration of the model knows."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.turned else self.shape

    def expert(self, codes: str, scales: str) -> QuantisedTensor:
        """Returns one of stacked experts, whose parts have these names."""
        return replace(self, shape=self.shape[1:], codes=codes, scales=scales, nbytes=self.nbytes // self.shape[0])

    def held_bits(self, *, on_gpu: bool) -> float:
        """Returns the bits of a number in memory where products are computed from blocks."""
        becomes = FORMS[self.form].on(gpu=on_gpu)
        whole = self.shape[-1] % BLOCK_INPUTS == 0
        # Nothing but the groups tells whether there are whole blocks of 8 bits with an offset.
        if self.form is Form.INT8_OFFSET:
            whole = whole and _whole_blocks(self.grid[1], self.shape[-1]) and not self.order
        return becomes.bits if whole else FORMS[Form.INT8_OFFSET].cpu.bits


Tensors = Mapping[str, StoredTensor]
_Finder = Callable[[str, Tensors, Quantisation], QuantisedTensor | None]


@dataclass(frozen=True, slots=True)
class FoundTensors:
    """The quantised weights of a folder, by the names that the model has for them."""

    quantised: dict[str, QuantisedTensor]
    unused: frozenset[str]
    """Tensors that round activations or a KV cache, of which nothing is rounded here."""


def quantised_tensors(tensors: Tensors, quantisation: Quantisation | None) -> FoundTensors:
    """Returns the weights of ``tensors`` that are quantised. Raises ModelError if something does not fit."""
    if quantisation is None:
        return FoundTensors({}, frozenset())
    if quantisation.method == "mxfp4":
        return FoundTensors(_of_gpt_oss(tensors), frozenset())
    find = _FINDERS[quantisation.method]
    found: dict[str, QuantisedTensor] = {}
    # A list may have hundreds of modules, and a folder tens of thousands of tensors.
    plain = frozenset(each for each in quantisation.ignored if not is_pattern(each))
    patterns = replace(quantisation, ignored=tuple(filter(is_pattern, quantisation.ignored)))
    for name in tensors:
        tensor = find(name, tensors, quantisation)
        if tensor is None:
            continue
        module = name.rpartition(".")[0]
        if module in plain or patterns.ignores(module):
            raise ModelError(
                f"{quantisation.file} lists {module!r} as a module that is not quantised, and tensor {name!r} is"
            )
        if (own := module + WEIGHT) in found or (own != name and own in tensors):
            raise _misfit(name, tensors[name], f"the same module has {own!r}, too")
        found[own] = tensor
    if not found:
        raise ModelError(
            f"{quantisation.file} says that weights are quantised ({quantisation.method}), and no tensor is"
        )
    unused = frozenset(name for name in tensors if name.rpartition(".")[2] in UNUSED)
    return FoundTensors(found, unused)


def _of_bytes(name: str, tensors: Tensors, quantisation: Quantisation) -> QuantisedTensor | None:
    """Finds FP8, and int8 of compressed-tensors."""
    tensor = tensors[name]
    kinds = {(scheme.kind, scheme.bits) for scheme in quantisation.schemes}
    if not name.endswith(WEIGHT) or tensor.form not in (FP8, "I8"):
        return None
    beside = f"{name.removesuffix(WEIGHT)}.scale"
    if tensor.form == "I8" and quantisation.method == "fp8" and beside in tensors:
        return _of_pairs(name, beside, tensors)
    if (("float", 8) if tensor.form == FP8 else ("int", 8)) not in kinds:
        raise _misfit(name, tensor, f"{quantisation.file} has no such weights ({quantisation.method})")
    _check_dimensions(name, tensor)
    known = (f"{name}_scale_inv", f"{name}_scale", beside)
    names = [each for each in known if each in tensors]
    if len(names) != 1:
        raise _misfit(name, tensor, f"it has {len(names)} of {', '.join(known)}")
    grid = _grid(name, tensor, names[0], tensors[names[0]], quantisation.block)
    groups = {scheme.group for scheme in quantisation.schemes if scheme.group > 0}
    if groups and quantisation.block is None and grid[0] == 1 and grid[1] not in {1, tensor.shape[1], *groups}:
        raise _misfit(names[0], tensors[names[0]], f"{quantisation.file} has groups of {sorted(groups)} inputs")
    zeros = f"{name}_zero_point" if f"{name}_zero_point" in tensors else ""
    if zeros and tensor.form == FP8:
        raise _misfit(zeros, tensors[zeros], "FP8 has no zeros")
    if not zeros and tensor.form != FP8 and any(each.offset for each in quantisation.schemes if each.kind == "int"):
        raise _misfit(name, tensor, f"{quantisation.file} says it is not symmetric, and there is no {name}_zero_point")
    if zeros and tensors[zeros].shape != tensors[names[0]].shape:
        raise _misfit(zeros, tensors[zeros], f"the scales have {list(tensors[names[0]].shape)}")
    form = Form.FP8_BLOCKS if grid[0] not in (1, tensor.shape[0]) else Form.FP8
    if not quantisation.rounds_inputs:
        form = Form.FP8_WEIGHTS
    if tensor.form != FP8:
        form = Form.INT8_OFFSET if zeros or not _whole_blocks(grid[1], tensor.shape[1]) else Form.INT8
    return _sized(QuantisedTensor(form, Packing.PLAIN, tensor.shape, name, names[0], grid, 0, zeros=zeros), tensors)


def _of_pairs(name: str, scale: str, tensors: Tensors) -> QuantisedTensor:
    """Returns a weight in MXFP4 whose bytes have two numbers each."""
    codes, scales = tensors[name], tensors[scale]
    _check_dimensions(name, codes)
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    if scales.form != "F8_E8M0" or scales.shape != (outputs, inputs // MXFP4_GROUP) or inputs % MXFP4_GROUP:
        raise _misfit(name, codes, f"MXFP4 needs a scale in F8_E8M0 for each {MXFP4_GROUP} numbers of a row in {scale}")
    found = QuantisedTensor(Form.MXFP4, Packing.HALVES, (outputs, inputs), name, scale, (1, MXFP4_GROUP), 0, 4)
    return _sized(found, tensors)


def _grid(
    name: str, tensor: StoredTensor, scale: str, scales: StoredTensor, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Returns the rows and columns that have one scale."""
    outputs, inputs = tensor.shape
    if scales.form not in SCALE_FORMATS:
        raise _misfit(scale, scales, f"scales are in {', '.join(sorted(SCALE_FORMATS))}")
    if block is not None and scales.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
        return block
    match scales.shape:
        case () | (1,) | (1, 1):
            return (outputs, inputs)
        case (rows,) | (rows, 1) if rows == outputs:
            return (1, inputs)
        case (rows, groups) if groups and rows == outputs and inputs % groups == 0 and block is None:
            return (1, inputs // groups)
    fitting = f" and blocks of {block[0]} × {block[1]}" if block else ""
    raise _misfit(scale, scales, f"which does not fit {name!r} of shape {list(tensor.shape)}{fitting}")


def _of_compressed(name: str, tensors: Tensors, quantisation: Quantisation) -> QuantisedTensor | None:
    """Finds what compressed-tensors writes."""
    if not name.endswith(".weight_packed"):
        return _of_bytes(name, tensors, quantisation)
    tensor, stem = tensors[name], name.removesuffix("_packed")
    _check_dimensions(name, tensor)
    scales = _other(f"{stem}_scale", tensors, name)
    if tensor.form == "U8":
        return _of_halves(name, f"{stem}_scale", f"{stem}_global_scale", tensors, quantisation, divides=True)
    if tensor.form != "I32":
        raise _misfit(name, tensor, "packed numbers are in I32 or U8")
    outputs, words = tensor.shape
    fitting = [
        (scheme, 32 // scheme.bits * words)
        for scheme in quantisation.schemes
        if scheme.kind == "int" and scales.shape == (outputs, _groups(32 // scheme.bits * words, scheme.group))
    ]
    if len(fitting) != 1:
        raise _misfit(name, tensor, f"with scales of shape {list(scales.shape)} it fits {len(fitting)} schemes")
    scheme, inputs = fitting[0]
    zeros, order, extent = (
        f"{stem}{end}" if f"{stem}{end}" in tensors else "" for end in ("_zero_point", "_g_idx", "_shape")
    )
    if order and not scheme.ordered:
        raise _misfit(order, tensors[order], f"{quantisation.file} has no act-order")
    if scheme.ordered and not order:
        raise _misfit(name, tensor, f"{quantisation.file} says act-order, and there is no {stem}_g_idx")
    if scheme.offset and not zeros:
        raise _misfit(name, tensor, f"{quantisation.file} says it is not symmetric, and there is no {stem}_zero_point")
    _check_scales(f"{stem}_scale", scales, scales.shape)
    found = QuantisedTensor(
        _of_integers(scheme, inputs, symmetric=not zeros, ordered=bool(order)),
        Packing.WORDS,
        (outputs, inputs),
        name,
        f"{stem}_scale",
        (1, _group_size(inputs, scheme.group)),
        0,
        scheme.bits,
        zeros=zeros,
        order=order,
        extent=extent,
    )
    if zeros:
        packed = (-(-outputs // (32 // scheme.bits)), scales.shape[1])
        if (tensors[zeros].form, tensors[zeros].shape) not in (("I32", packed), ("I8", scales.shape)):
            raise _misfit(zeros, tensors[zeros], f"packed zeros have {list(packed)} in I32")
    _check_order(found, tensors)
    return _sized(found, tensors)


def _of_halves(
    name: str, scale: str, factor: str, tensors: Tensors, quantisation: Quantisation, *, divides: bool
) -> QuantisedTensor:
    """Returns a weight in NVFP4, or in MXFP4 if its scales are powers of two."""
    tensor, scales = tensors[name], _other(scale, tensors, name)
    if not any((scheme.kind, scheme.bits) == ("float", 4) for scheme in quantisation.schemes):
        raise _misfit(name, tensor, f"{quantisation.file} has no numbers of 4 bits that are no integers")
    outputs, inputs = tensor.shape[0], 2 * tensor.shape[1]
    if scales.form == "U8":
        form, group, factor = Form.MXFP4, MXFP4_GROUP, ""
    elif scales.form == FP8:
        form, group = Form.NVFP4, NVFP4_GROUP
        if _other(factor, tensors, name).form != "F32" or tensors[factor].shape not in ((), (1,)):
            raise _misfit(factor, tensors[factor], "NVFP4 has one factor in F32")
    else:
        raise _misfit(scale, scales, "NVFP4 has scales in F8_E4M3, MXFP4 in U8")
    if scales.shape != (outputs, inputs // group) or inputs % group:
        raise _misfit(scale, scales, f"{name!r} has {outputs} rows of {inputs} numbers in groups of {group}")
    found = QuantisedTensor(
        form, Packing.HALVES, (outputs, inputs), name, scale, (1, group), 0, 4, factor=factor, divides=divides
    )
    return _sized(found, tensors)


def _of_gptq(name: str, tensors: Tensors, quantisation: Quantisation) -> QuantisedTensor | None:
    if not name.endswith(".qweight"):
        return None
    tensor, stem, scheme = tensors[name], name.removesuffix("qweight"), quantisation.schemes[0]
    _check_dimensions(name, tensor)
    per = 32 // scheme.bits
    inputs, outputs = tensor.shape[0] * per, tensor.shape[1]
    groups, zeros, order = _groups(inputs, scheme.group), f"{stem}qzeros", f"{stem}g_idx"
    _check_words(name, tensor, (inputs // per, outputs))
    _check_scales(f"{stem}scales", _other(f"{stem}scales", tensors, name), (groups, outputs))
    _check_words(zeros, _other(zeros, tensors, name), (groups, -(-outputs // per)))
    order = order if order in tensors else ""
    if scheme.ordered and not order:
        raise _misfit(name, tensor, f"{quantisation.file} says desc_act, and there is no {stem}g_idx")
    found = QuantisedTensor(
        _of_integers(scheme, inputs, symmetric=quantisation.symmetric, ordered=scheme.ordered),
        Packing.GPTQ,
        (outputs, inputs),
        name,
        f"{stem}scales",
        (1, _group_size(inputs, scheme.group)),
        0,
        scheme.bits,
        zeros=zeros,
        first_zero=quantisation.first_zero,
        order=order,
    )
    _check_order(found, tensors)
    return _sized(found, tensors)


def _of_awq(name: str, tensors: Tensors, quantisation: Quantisation) -> QuantisedTensor | None:
    if not name.endswith(".qweight"):
        return None
    tensor, stem, scheme = tensors[name], name.removesuffix("qweight"), quantisation.schemes[0]
    _check_dimensions(name, tensor)
    inputs, words = tensor.shape
    groups = _groups(inputs, scheme.group)
    _check_words(name, tensor, (inputs, words))
    _check_scales(f"{stem}scales", _other(f"{stem}scales", tensors, name), (groups, 8 * words))
    _check_words(f"{stem}qzeros", _other(f"{stem}qzeros", tensors, name), (groups, words))
    found = QuantisedTensor(
        _of_integers(scheme, inputs, symmetric=False, ordered=False),
        Packing.AWQ,
        (8 * words, inputs),
        name,
        f"{stem}scales",
        (1, _group_size(inputs, scheme.group)),
        0,
        4,
        zeros=f"{stem}qzeros",
    )
    return _sized(found, tensors)


def _of_modelopt(name: str, tensors: Tensors, quantisation: Quantisation) -> QuantisedTensor | None:
    if name.endswith(WEIGHT) and tensors[name].form == "U8":
        _check_dimensions(name, tensors[name])
        return _of_halves(name, f"{name}_scale", f"{name}_scale_2", tensors, quantisation, divides=False)
    return _of_bytes(name, tensors, quantisation)


def _of_mlx(name: str, tensors: Tensors, quantisation: Quantisation) -> QuantisedTensor | None:
    tensor = tensors[name]
    if not name.endswith(WEIGHT) or tensor.form != "U32":
        return None
    stem = name.removesuffix("weight")
    scheme = quantisation.scheme_of(stem.removesuffix("."))
    _check_dimensions(name, tensor)
    outputs, words = tensor.shape
    inputs = 32 // scheme.bits * words
    groups = (outputs, _groups(inputs, scheme.group))
    for each in (f"{stem}scales", f"{stem}biases"):
        _check_scales(each, _other(each, tensors, name), groups)
    found = QuantisedTensor(
        _of_integers(scheme, inputs, symmetric=False, ordered=False),
        Packing.WORDS,
        (outputs, inputs),
        name,
        f"{stem}scales",
        (1, _group_size(inputs, scheme.group)),
        0,
        scheme.bits,
        offsets=f"{stem}biases",
    )
    return _sized(found, tensors)


def _of_gpt_oss(tensors: Tensors) -> dict[str, QuantisedTensor]:
    """Returns the weights that are pairs of blocks and scales."""
    found: dict[str, QuantisedTensor] = {}
    for name in sorted(each.removesuffix(BLOCKS) for each in tensors if each.endswith(BLOCKS)):
        blocks, scales = tensors[name + BLOCKS], tensors.get(name + SCALES)
        if scales is None:
            continue
        fits = blocks.form == scales.form == "U8" and blocks.shape == (*scales.shape, _MXFP4_BYTES)
        if not fits or len(scales.shape) < 2:
            raise ModelError(
                f"tensor {name + BLOCKS!r} of shape {list(blocks.shape)} in {blocks.form} has scales of shape "
                f"{list(scales.shape)} in {scales.form}; MXFP4 needs [..., {_MXFP4_BYTES}] and [...] in U8"
            )
        shape = (*scales.shape[:-1], scales.shape[-1] * MXFP4_GROUP)
        both = (name + BLOCKS, name + SCALES)
        tensor = QuantisedTensor(Form.MXFP4, Packing.HALVES, shape, *both, (1, MXFP4_GROUP), 0, 4, turned=True)
        found[name] = _sized(tensor, tensors)
    if not found:
        raise ModelError("config.json says that weights are quantised (mxfp4), and no tensor is")
    return found


_FINDERS: Mapping[str, _Finder] = {
    "fp8": _of_bytes,
    "fbgemm_fp8": _of_bytes,
    "compressed-tensors": _of_compressed,
    "gptq": _of_gptq,
    "awq": _of_awq,
    "modelopt": _of_modelopt,
    "mlx": _of_mlx,
}


def _of_integers(scheme: Scheme, inputs: int, *, symmetric: bool, ordered: bool) -> Form:
    whole = not ordered and _whole_blocks(_group_size(inputs, scheme.group), inputs)
    if scheme.bits == 8:
        return Form.INT8 if whole and symmetric else Form.INT8_OFFSET
    if not whole:
        return Form.INT4_SCATTERED
    return Form.INT4 if symmetric else Form.INT4_OFFSET


def _whole_blocks(group: int, inputs: int) -> bool:
    return group % BLOCK_INPUTS == 0 or group >= inputs


def _group_size(inputs: int, group: int) -> int:
    return group if 0 < group < inputs else inputs


def _groups(inputs: int, group: int) -> int:
    return -(-inputs // _group_size(inputs, group))


def _sized(tensor: QuantisedTensor, tensors: Tensors) -> QuantisedTensor:
    return replace(tensor, nbytes=sum(tensors[part].nbytes for part in tensor.parts))


def _other(name: str, tensors: Tensors, beside: str) -> StoredTensor:
    found = tensors.get(name)
    if found is None:
        raise ModelError(f"tensor {beside!r} is quantised, and there is no tensor {name!r}")
    return found


def _check_dimensions(name: str, tensor: StoredTensor) -> None:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise _misfit(name, tensor, "quantised weights of two dimensions, none of them 0, are read")


def _check_words(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.form != "I32" or tensor.shape != shape:
        raise _misfit(name, tensor, f"{list(shape)} in I32 is expected")


def _check_scales(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.form not in SCALE_FORMATS or tensor.shape != shape:
        raise _misfit(name, tensor, f"{list(shape)} in one of {', '.join(sorted(SCALE_FORMATS))} is expected")


def _check_order(tensor: QuantisedTensor, tensors: Tensors) -> None:
    if tensor.order and (tensors[tensor.order].form, tensors[tensor.order].shape) != ("I32", tensor.shape[1:]):
        raise _misfit(tensor.order, tensors[tensor.order], f"{list(tensor.shape[1:])} in I32 is expected")


def _misfit(name: str, tensor: StoredTensor, why: str) -> ModelError:
    return ModelError(f"tensor {name!r} of shape {list(tensor.shape)} in {tensor.form} cannot be read: {why}")
