"""Says how a folder's weights are quantised, by its configuration, and what each form of them becomes.

``FORMS`` is the one table of that: the page of formats prints it, and readers follow it. A folder whose weights are in
another form is refused by its name before a weight is read: such numbers mean nothing without the settings and scales
that belong to them. Read as they are, they would give a model that answers with nonsense and no error.

Nothing here loads torch.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec

from pdserve.errors import ModelError
from pdserve.models.checkpoint.model_files import plain_json

BLOCK_INPUTS = 32
"""The inputs of a block of all formats below."""


class Form(enum.Enum):
    """How the numbers of a weight are stored."""

    FP8_BLOCKS = "FP8 (e4m3), a scale for each block of rows and columns"
    FP8 = "FP8 (e4m3), a scale for each output, or one for all"
    FP8_WEIGHTS = "FP8 (e4m3) for weights alone: compressed-tensors without `input_activations`"
    INT4 = "4 bits, symmetric, groups of whole 32 inputs"
    INT4_OFFSET = "4 bits with an offset, groups of whole 32 inputs"
    INT4_SCATTERED = "4 bits, groups of other inputs: act-order, or fewer than 32"
    INT8 = "8 bits, symmetric"
    INT8_OFFSET = "8 bits with an offset, or groups of other inputs"
    NVFP4 = "NVFP4 (e2m1), an e4m3 scale for 16 inputs, one for all"
    MXFP4 = "MXFP4 (e2m1), a power of two for 32 inputs"


@dataclass(frozen=True, slots=True)
class Becomes:
    """What a form becomes in memory."""

    blocks: str
    """The name of the blocks (``BlockFormat``) from which products are computed; empty if none."""
    bits: float
    """The bits of a number in these blocks, with its part of the scales; 16 without blocks."""
    why: str
    """Says what that does to the numbers."""


@dataclass(frozen=True, slots=True)
class ByDevice:
    """What a form becomes where products are computed from blocks."""

    cpu: Becomes
    gpu: Becomes

    def on(self, *, gpu: bool) -> Becomes:
        return self.gpu if gpu else self.cpu


def _alike(blocks: str, bits: float, why: str) -> ByDevice:
    becomes = Becomes(blocks, bits, why)
    return ByDevice(becomes, becomes)


_SAME = "the same numbers"
_ROUNDED = "rounded: adds 0.5% (RMS) to the format's own {own}; a tensor to which it adds 1% is dequantised"
_FP8_ON_CPU = Becomes("Q8_0", 8.5, _ROUNDED.format(own="2.6%"))
_FP8 = ByDevice(_FP8_ON_CPU, Becomes("FP8", 8.25, f"{_SAME}; since sm_89, inputs are rounded to FP8, too: adds 2.6%"))
FORMS: Mapping[Form, ByDevice] = {
    Form.FP8_BLOCKS: _FP8,
    Form.FP8: _FP8,
    Form.FP8_WEIGHTS: ByDevice(_FP8_ON_CPU, Becomes("FP8_SHORT", 9.0, f"{_SAME}; inputs are never rounded")),
    Form.INT4: _alike("Q4_0", 4.5, _SAME),
    Form.INT4_OFFSET: _alike("Q4_1", 5.0, "the same to a sixteenth of a step"),
    Form.INT4_SCATTERED: _alike("Q8_0", 8.5, _ROUNDED.format(own="9%")),
    Form.INT8: _alike("Q8_0", 8.5, "the same to a sixteenth of a step"),
    Form.INT8_OFFSET: ByDevice(
        Becomes("", 16.0, "no block format of a CPU has 8 bits and an offset"),
        Becomes("Q8_OFFSET", 10.0, f"{_SAME}; groups of other inputs are dequantised"),
    ),
    Form.NVFP4: ByDevice(Becomes("Q8_0", 8.5, _ROUNDED.format(own="9%")), Becomes("NVFP4", 4.5, _SAME)),
    Form.MXFP4: _alike("MXFP4", 4.25, _SAME),
}
"""What becomes of each form where products are computed from blocks. Elsewhere, all are dequantised while they load."""


METHODS: Mapping[str, tuple[str, str]] = {
    "fp8": (
        "FP8: DeepSeek's and Qwen's 128 × 128 blocks, or one scale for a weight; DeepSeek V4's experts in MXFP4",
        "e5m2",
    ),
    "fbgemm_fp8": ("FP8 for each output", ""),
    "compressed-tensors": (
        "`float-quantized`, `int-quantized`, `naive-quantized`, `pack-quantized` (4 and 8 bits, act-order), "
        "`nvfp4-pack-quantized`, `mxfp4-pack-quantized`, `mixed-precision` of these",
        "sparse weights, transforms, other bits",
    ),
    "awq": ("4 bits of the version `gemm`", "`gemv`, other packings"),
    "gptq": ("4 and 8 bits, with and without `desc_act`, of both conventions of zeros", "2 and 3 bits"),
    "modelopt": ("`FP8` and `NVFP4`, also by `hf_quant_config.json`", "`MIXED_PRECISION`, `W4A8_AWQ` and others"),
    "mlx": ("4 and 8 bits in groups (`quantization` without a method)", "2, 3, 5 and 6 bits, other modes"),
    "mxfp4": ("experts of a gpt-oss", "other families"),
}
"""What is read of each ``quant_method``, and what of it is refused."""
ANY_FAMILY = frozenset({"mxfp4"})
"""The methods of single families (``FamilySettings.quantisations``)."""

UNUSED = (
    *("input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "activation_scale"),
    *("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale", "k_zero_point", "v_zero_point"),
)
"""The last parts of the names of tensors that round activations or a KV cache, which are not rounded here."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One of the ways in which weights of a folder are quantised."""

    kind: Literal["int", "float"]
    bits: int
    group: int = 0
    """The inputs with one scale; -1 if all have one, 0 if the scales tell it."""
    ordered: bool = False
    """Whether a tensor says which group an input belongs to."""
    offset: bool = False
    """Whether a tensor has the numbers that stand for 0, where files say so."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the weights of a folder are quantised, as its configuration says it."""

    method: str
    """One of ``METHODS``."""
    file: str
    schemes: tuple[Scheme, ...]
    block: tuple[int, int] | None = None
    """The rows and columns that have one scale, if it is neither of a row nor of all."""
    symmetric: bool = True
    first_zero: int = 0
    """What is added to stored zeros (GPTQ)."""
    modules: Mapping[str, Scheme | None] = field(default_factory=dict)
    """The schemes of modules that have one of their own, or None for those that are not quantised (MLX)."""
    ignored: tuple[str, ...] = ()
    """Patterns of modules that are not quantised."""
    rounds_inputs: bool = True
    """Whether the inputs of weights in FP8 are meant to be rounded to FP8."""

    def scheme_of(self, module: str) -> Scheme:
        """Returns the scheme of a module where a folder has one for all but some."""
        return self.modules.get(module) or self.schemes[0]

    def ignores(self, module: str) -> bool:
        """Returns whether a module is listed as one that is not quantised."""
        return (module in self.modules and self.modules[module] is None) or any(
            _matches(pattern, module) for pattern in self.ignored
        )


def is_pattern(ignored: str) -> bool:
    """Returns whether an entry of ``Quantisation.ignored`` is no name of a module."""
    return "*" in ignored or ignored.startswith("re:")


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        if len(pattern) > LONGEST_PATTERN or _NESTED.search(pattern):
            # It could take for ever, and what it says is compared with the tensors alone.
            return False
        try:
            return re.match(pattern.removeprefix("re:"), module) is not None
        except re.error:
            return False
    return fnmatchcase(module, pattern) if "*" in pattern else module == pattern


LONGEST_PATTERN = 400
_NESTED = re.compile(r"[+*]\)[+*{]")
"""Repeated repetitions, of which a match may take time that grows exponentially."""


class _Settings(msgspec.Struct):
    """What a file may say of quantisation. ``text_config`` is the text part of a model that takes images, too."""

    quantization_config: dict[str, object] | None = None
    compression_config: dict[str, object] | None = None
    """What files of 2024 call it."""
    text_config: _Settings | None = None
    quantization: dict[str, object] | None = None
    """What ``hf_quant_config.json`` and MLX call it."""


def read_quantisation(folder: Path, own: Container[object] = ()) -> Quantisation | None:
    """Returns how a folder's weights are quantised, or None if they are not.

    ``own`` has methods that only the family of the model knows. Raises ModelError for a method or a form that is not
    read, by its name.
    """
    found = _said(folder)
    if found is None:
        return None
    file, method, settings = found
    if method not in METHODS or (method in ANY_FAMILY and method not in own):
        raise _refusal(folder, file, method, settings, "such weights are not read here")
    try:
        return _READERS[method](file, settings)
    except (ModelError, ValueError) as exc:
        raise _refusal(folder, file, method, settings, str(exc)) from exc


def refuse_unknown_quantisation(folder: Path, known: Container[object]) -> None:
    """Raises ModelError if the folder's weights are quantised by a method that is not among ``known``.

    It is for models that transformers loads.
    """
    found = _said(folder)
    if found is None:
        return
    file, method, settings = found
    if file == "config.json" and settings.get("quant_method") in known:
        return
    raise _refusal(folder, file, method, settings, "such weights are not read here")


def _said(folder: Path) -> tuple[str, str, dict[str, object]] | None:
    """Returns the file that says how weights are quantised, the method, and its settings. Raises ModelError."""
    for file in ("config.json", "hf_quant_config.json"):
        path = folder / file
        try:
            said = msgspec.json.decode(plain_json(path.read_bytes()), type=_Settings)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as exc:
            raise ModelError(f"{path} cannot be read: {exc}") from exc
        for settings in (said, said.text_config or _Settings()):
            found = settings.quantization_config or settings.compression_config
            method = str((found or {}).get("quant_method") or "")
            if found and (method or settings.quantization is None):
                return file, "modelopt" if method.startswith("modelopt") else method, found
            if settings.quantization and file == "config.json":
                return file, "mlx", settings.quantization
        if said.quantization and said.quantization.get("quant_algo"):
            return file, "modelopt", said.quantization
    return None


def _refusal(folder: Path, file: str, method: str, settings: Mapping[str, object], why: str) -> ModelError:
    algorithm = settings.get("quant_algo") or settings.get("format")
    words = (method or "without a quant_method") + (f", {algorithm}" if algorithm else "")
    return ModelError(
        f"the weights in {folder} are quantised ({file}: {words}), and {why}; a folder with bf16 weights or a GGUF "
        "file would be read"
    )


class _Fp8(msgspec.Struct):
    weight_block_size: tuple[int, int] | None = None
    fmt: str = "e4m3"
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None


def _fp8(file: str, settings: dict[str, object]) -> Quantisation:
    found = msgspec.convert(settings, _Fp8)
    if found.fmt not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"numbers in {found.fmt} are not read, e4m3 is")
    block = _block(found.weight_block_size)
    ignored = (*(found.modules_to_not_convert or ()), *(found.ignored_layers or ()))
    return Quantisation(str(settings["quant_method"]), file, (Scheme("float", 8),), block, ignored=ignored)


def _block(size: tuple[int, int] | list[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    if len(size) != 2 or min(size) < 1:
        raise ModelError(f"blocks of {list(size)} are not rows and columns")
    return (size[0], size[1])


class _Awq(msgspec.Struct):
    bits: int = 4
    w_bit: int | None = None
    group_size: int = 128
    q_group_size: int | None = None
    version: str = "gemm"
    backend: str = "autoawq"
    modules_to_not_convert: list[str] | None = None


def _awq(file: str, settings: dict[str, object]) -> Quantisation:
    found = msgspec.convert(settings, _Awq)
    bits, group = found.w_bit or found.bits, found.q_group_size or found.group_size
    if bits != 4:
        raise ModelError(f"{bits} bits are not read, 4 are")
    if (found.version.lower(), found.backend.lower()) != ("gemm", "autoawq"):
        raise ModelError(f"its packing, {found.version} of {found.backend}, is not read; gemm of autoawq is")
    # Its modules are parts of names: "gate" is a router, and no gate_proj. So the files decide alone.
    return Quantisation("awq", file, (Scheme("int", 4, _group(group)),), symmetric=False)


def _group(size: int) -> int:
    if size != -1 and size < 1:
        raise ModelError(f"groups of {size} inputs are no groups")
    return size


class _Gptq(msgspec.Struct):
    bits: int
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: str | None = None
    format: str | None = None
    is_marlin_format: bool = False
    dynamic: dict[str, object] | None = None


def _gptq(file: str, settings: dict[str, object]) -> Quantisation:
    found = msgspec.convert(settings, _Gptq)
    if found.bits not in (4, 8):
        raise ModelError(f"{found.bits} bits are not read, 4 and 8 are")
    packing = found.checkpoint_format or found.format or "gptq"
    if packing not in ("gptq", "gptq_v2") or found.is_marlin_format or (found.format or packing) != packing:
        raise ModelError(f"its packing, {packing}, is not read; gptq and gptq_v2 are")
    # Those that begin so are modules that are not quantised, which the files tell, too.
    if own := [module for module in found.dynamic or () if not module.startswith("-:")]:
        raise ModelError(f"modules with settings of their own (dynamic: {own[0]}) are not read")
    scheme = Scheme("int", found.bits, _group(found.group_size), found.desc_act)
    first = 1 if packing == "gptq" else 0
    return Quantisation("gptq", file, (scheme,), symmetric=found.sym, first_zero=first)


class _CompressedWeights(msgspec.Struct):
    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: list[int] | str | None = None
    actorder: str | bool | None = None


class _CompressedGroup(msgspec.Struct):
    weights: _CompressedWeights | None = None
    input_activations: dict[str, object] | None = None
    format: str | None = None


class _Compressed(msgspec.Struct):
    config_groups: dict[str, _CompressedGroup] = {}
    format: str | None = "dense"
    ignore: list[str] | None = None
    sparsity_config: dict[str, object] | None = None
    transform_config: dict[str, object] | None = None


_COMPRESSED_FORMATS = frozenset(
    {
        *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"),
        *("mxfp4-pack-quantized", "mixed-precision"),
    }
)
_COMPRESSED_KINDS = frozenset({("int", 4), ("int", 8), ("float", 4), ("float", 8)})


def _compressed(file: str, settings: dict[str, object]) -> Quantisation:
    found = msgspec.convert(settings, _Compressed)
    formats = {found.format, *(group.format for group in found.config_groups.values())} - {None}
    if unknown := sorted(str(form) for form in formats if form not in _COMPRESSED_FORMATS):
        raise ModelError(f"the format {unknown[0]} is not read")
    sparse = (found.sparsity_config or {}).get("format")
    if sparse not in ("dense", None):
        raise ModelError(f"sparse weights ({sparse}) are not read")
    if found.transform_config and found.transform_config.get("config_groups"):
        raise ModelError("transforms (transform_config) are not computed")
    schemes: list[Scheme] = []
    block = None
    for weights in (group.weights for group in found.config_groups.values() if group.weights is not None):
        if (weights.type, weights.num_bits) not in _COMPRESSED_KINDS:
            raise ModelError(f"{weights.type} of {weights.num_bits} bits is not read")
        if weights.strategy == "block":
            size = weights.block_structure
            own = _block([int(each) for each in size.split("x")] if isinstance(size, str) else size)
            if block not in (None, own):
                raise ModelError("blocks of several sizes are not read")
            block = own
        group = _group(weights.group_size) if weights.group_size else 0
        if not group and weights.strategy in ("channel", "tensor"):
            group = -1
        ordered = weights.actorder in ("group", "dynamic", True)
        schemes.append(Scheme(weights.type, weights.num_bits, group, ordered, not weights.symmetric))
    if not schemes:
        raise ModelError("it does not say how weights are (config_groups)")
    groups = [group for group in found.config_groups.values() if group.weights and group.weights.type == "float"]
    return Quantisation(
        "compressed-tensors",
        file,
        tuple(dict.fromkeys(schemes)),
        block,
        ignored=tuple(found.ignore or ()),
        # One answer for all weights, because groups are told apart by their forms alone.
        rounds_inputs=all(group.input_activations for group in groups if group.weights and group.weights.num_bits == 8),
    )


class _Modelopt(msgspec.Struct):
    quant_algo: str | None = None
    group_size: int | None = None
    exclude_modules: list[str] | None = None
    ignore: list[str] | None = None


def _modelopt(file: str, settings: dict[str, object]) -> Quantisation:
    within = settings.get("quantization")  # Some files have in config.json what hf_quant_config.json has.
    found = msgspec.convert(within if isinstance(within, dict) else settings, _Modelopt)
    match found.quant_algo:
        case "FP8":
            scheme = Scheme("float", 8)
        case "NVFP4":
            scheme = Scheme("float", 4)
            if found.group_size not in (None, 0, 16):
                raise ModelError(f"groups of {found.group_size} inputs are not read, 16 are")
        case _:
            raise ModelError(f"of its algorithms, FP8 and NVFP4 are read, and not {found.quant_algo}")
    ignored = (*(found.exclude_modules or ()), *(found.ignore or ()))
    return Quantisation("modelopt", file, (scheme,), ignored=ignored)


class _Mlx(msgspec.Struct):
    bits: int
    group_size: int
    mode: str = "affine"


def _mlx(file: str, settings: dict[str, object]) -> Quantisation:
    modules: dict[str, Scheme | None] = {}
    for module, own in settings.items():
        if own is False:
            modules[module] = None
        elif isinstance(own, dict):
            modules[module] = _mlx_scheme(own)
    return Quantisation("mlx", file, (_mlx_scheme(settings),), symmetric=False, modules=modules)


def _mlx_scheme(settings: Mapping[str, object]) -> Scheme:
    found = msgspec.convert(settings, _Mlx)
    if found.mode != "affine":
        raise ModelError(f"the mode {found.mode} is not read, affine is")
    if found.bits not in (4, 8):
        raise ModelError(f"{found.bits} bits are not read, 4 and 8 are")
    return Scheme("int", found.bits, _group(found.group_size))


def _mxfp4(file: str, settings: dict[str, object]) -> Quantisation:
    return Quantisation("mxfp4", file, (Scheme("float", 4),))


_READERS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mlx": _mlx,
    "mxfp4": _mxfp4,
}
