"""Quantises the weights of a folder in each format that is read, and says which numbers they then stand for.

Nothing is shared with what reads them: words are packed number by number, and the dequantised weight is computed beside
its codes. ``python -m tests.models.quantisers`` prints the cases.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
Quantiser = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]
"""Takes an fp32 weight, and returns its tensors by what follows the module's name, and the numbers that they mean."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of a word, from its lowest bits on."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def words(codes: torch.Tensor, bits: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Packs the last dimension, the first number in the lowest bits. What a word lacks is 0."""
    per = 32 // bits
    packed = torch.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per)), dtype=torch.int64)
    for number in range(codes.shape[-1]):
        packed[..., number // per] |= codes[..., number].long() << bits * (number % per)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).view(dtype)


def grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.reshape(*weight.shape[:-1], -1, weight.shape[-1] if group < 0 else group)


def affine(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes ``[out, in]``, and fp16 scales and integer zeros ``[out, groups]``."""
    spans, top = grouped(weight, group), 2**bits - 1
    low, high = spans.amin(-1).clamp(max=0), spans.amax(-1).clamp(min=0)
    scales = ((high - low) / top).clamp(min=1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, top)
    codes = (spans / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return codes.clamp(0, top).flatten(1), scales, zeros


def symmetric(
    weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns signed codes ``[out, in]`` and scales ``[out, groups]``."""
    spans, top = grouped(weight, group), 2 ** (bits - 1) - 1
    scales = (spans.abs().amax(-1) / top).clamp(min=1e-5).to(dtype)
    codes = (spans / scales.float().unsqueeze(-1)).round().clamp(-top - 1, top)
    return codes.flatten(1), scales


def widened(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | float, group: int) -> torch.Tensor:
    spans = grouped(codes.float(), group)
    offset = zeros.float().unsqueeze(-1) if isinstance(zeros, torch.Tensor) else zeros
    return ((spans - offset) * scales.float().unsqueeze(-1)).flatten(1)


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = (weight.abs().amax() / 448).clamp(min=1e-8)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * scale


def fp8_blocks(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, plain = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty((-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            codes[at], scales[row, column], plain[at] = fp8(weight[at])
    return {"weight": codes, "weight_scale_inv": scales}, plain


def fp8_outputs(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    found = [fp8(row) for row in weight]
    scales = torch.stack([scale for _, scale, _ in found]).unsqueeze(1)
    return {"weight": torch.stack([codes for codes, _, _ in found]), "weight_scale": scales}, torch.stack(
        [plain for _, _, plain in found]
    )


def fp8_whole(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, scale, plain = fp8(weight)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, plain


def awq(group: int) -> Quantiser:
    def quantise(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        codes, scales, zeros = affine(weight, 4, group)

        def packed(numbers: torch.Tensor) -> torch.Tensor:
            return words(numbers.reshape(len(numbers), -1, 8)[..., list(AWQ_ORDER)].flatten(-2), 4)

        parts = {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scales.t().contiguous()}
        return parts, widened(codes, scales, zeros, group)

    return quantise


def gptq(bits: int, group: int, *, ordered: bool = False, offset: bool = False, first: int = 1) -> Quantiser:
    """``first`` is 1 where zeros are stored less one. With ``ordered``, columns are quantised in another order."""

    def quantise(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(3)) if ordered else torch.arange(inputs)
        if offset:
            codes, scales, zeros = affine(weight[:, order], bits, group)
        else:
            signed, scales = symmetric(weight[:, order], bits, group)
            zeros = torch.full_like(scales, 2 ** (bits - 1)).float()
            codes = signed + 2 ** (bits - 1)
        back = order.argsort()
        parts = {
            "qweight": words(codes[:, back], bits).t().contiguous(),
            "qzeros": words(zeros.t(), bits) - first * sum(1 << bits * place for place in range(32 // bits)),
            "scales": scales.t().contiguous(),
            "g_idx": (back // (inputs if group < 0 else group)).int(),
        }
        # The words lie along the inputs.
        return parts, widened(codes, scales, zeros, group)[:, back]

    return quantise


def packed(
    bits: int, group: int, *, offset: bool = False, ordered: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Quantiser:
    """Does what compressed-tensors calls pack-quantized."""

    def quantise(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(4)) if ordered else torch.arange(inputs)
        back = order.argsort()
        parts: Parts = {"weight_shape": torch.tensor(weight.shape)}
        if offset:
            codes, scales, zeros = affine(weight[:, order], bits, group)
            scales = scales.to(dtype)
            parts["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
        else:
            signed, scales = symmetric(weight[:, order], bits, group, dtype)
            codes, zeros = signed + 2 ** (bits - 1), torch.full(scales.shape, 2.0 ** (bits - 1))
        if ordered:
            parts["weight_g_idx"] = (back // group).int()
        parts |= {"weight_packed": words(codes[:, back], bits), "weight_scale": scales}
        return parts, widened(codes, scales, zeros, group)[:, back]

    return quantise


def int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, scales = symmetric(weight, 8, -1, torch.bfloat16)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, widened(codes, scales, 0.0, -1)


def mlx(bits: int, group: int, dtype: torch.dtype = torch.bfloat16) -> Quantiser:
    def quantise(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        spans, top = grouped(weight, group), 2**bits - 1
        biases = spans.amin(-1).to(dtype)
        scales = ((spans.amax(-1) - biases.float()) / top).clamp(min=1e-4).to(dtype)
        codes = ((spans - biases.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round().clamp(0, top)
        plain = codes * scales.float().unsqueeze(-1) + biases.float().unsqueeze(-1)
        stored = words(codes.flatten(1), bits, torch.uint32)
        return {"weight": stored, "scales": scales, "biases": biases}, plain.flatten(1)

    return quantise


def e2m1(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bytes of two codes each, and the numbers that these mean, for numbers from -6 to 6."""
    places = (numbers.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    codes = places + 8 * (numbers < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), E2M1[places] * torch.where(numbers < 0, -1, 1)


def nvfp4(codes: str, factor: str, *, divides: bool) -> Quantiser:
    def quantise(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        spans = grouped(weight, 16)
        whole = weight.abs().amax() / (448 * 6)
        scales = (spans.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        stored_factor = (1 / whole if divides else whole).reshape(1)
        each = scales.float() / stored_factor if divides else scales.float() * stored_factor
        each = each.unsqueeze(-1)
        stored, numbers = e2m1(torch.where(each > 0, spans / each, 0).clamp(-6, 6))
        parts = {codes: stored.flatten(1), "weight_scale": scales, factor: stored_factor}
        parts["input_global_scale" if divides else "input_scale"] = torch.ones(1)
        return parts, (numbers * each).flatten(1)

    return quantise


def mxfp4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    spans = grouped(weight, 32)
    exponents = (spans.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2).int()
    each = torch.exp2(exponents.float()).unsqueeze(-1)
    stored, numbers = e2m1((spans / each).clamp(-6, 6))
    parts = {"weight_packed": stored.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}
    return parts, (numbers * each).flatten(1)


def mxfp4_pairs(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As DeepSeek V4 has its experts."""
    parts, numbers = mxfp4(weight)
    scale = parts["weight_scale"].view(torch.float8_e8m0fnu)
    return {"weight": parts["weight_packed"].view(torch.int8), "scale": scale}, numbers


def fp8_powers(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As DeepSeek V4 has its other weights: scales of blocks are powers of two."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // 128), -(-inputs // 128)
    padded = torch.nn.functional.pad(weight, (0, 128 * columns - inputs, 0, 128 * rows - outputs))
    most = padded.view(rows, 128, columns, 128).abs().amax((1, 3))
    scale = torch.exp2((most / 448).clamp(min=1e-8).log2().ceil())
    each = scale.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": codes, "scale": scale.to(torch.float8_e8m0fnu)}, codes.float() * each


@dataclass(frozen=True, slots=True)
class Format:
    """A format of weights, and what a ``config.json`` says of it."""

    quantise: Quantiser
    config: Mapping[str, Any]
    blocks: str
    """What the weights become on a CPU."""
    embedded: bool = False
    """Whether the embedding is quantised, too."""


def _compressed(form: str, inputs: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    said = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"0": group}}
    return {"quantization_config": said}


def _said(method: str, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **settings}}


_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_DYNAMIC = {"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
FORMATS: dict[str, Format] = {
    "fp8-blocks": Format(fp8_blocks, _said("fp8", weight_block_size=[128, 128], fmt="e4m3", **_DYNAMIC), "Q8_0"),
    "fp8-powers": Format(fp8_powers, _said("fp8", weight_block_size=[128, 128], scale_fmt="ue8m0", **_DYNAMIC), "Q8_0"),
    "mxfp4-pairs": Format(mxfp4_pairs, _said("fp8", weight_block_size=[128, 128], **_DYNAMIC), "MXFP4"),
    "fp8-static": Format(fp8_whole, _said("fp8", activation_scheme="static"), "Q8_0"),
    "fbgemm": Format(fp8_outputs, _said("fbgemm_fp8", activation_scale_ub=1200.0), "Q8_0"),
    "ct-fp8": Format(
        fp8_outputs, _compressed("float-quantized", _TOKENS, num_bits=8, type="float", strategy="channel"), "Q8_0"
    ),
    "modelopt-fp8": Format(fp8_whole, _said("modelopt", quant_algo="FP8", ignore=["lm_head"]), "Q8_0"),
    "awq": Format(awq(64), _said("awq", bits=4, group_size=64, zero_point=True, version="gemm"), "Q4_1"),
    "gptq": Format(gptq(4, 32), _said("gptq", bits=4, group_size=32, sym=True, desc_act=False), "Q4_0"),
    "gptq-offset": Format(gptq(4, 64, offset=True), _said("gptq", bits=4, group_size=64, sym=False), "Q4_1"),
    "gptq-v2": Format(
        gptq(4, 32, offset=True, first=0),
        _said("gptq", bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2"),
        "Q4_1",
    ),
    "gptq-ordered": Format(
        gptq(4, 32, ordered=True), _said("gptq", bits=4, group_size=32, sym=True, desc_act=True), "Q8_0"
    ),
    "gptq-8": Format(gptq(8, -1), _said("gptq", bits=8, group_size=-1, sym=True), "Q8_0"),
    "ct-int4": Format(
        packed(4, 32), _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32), "Q4_0"
    ),
    "ct-int4-offset": Format(
        packed(4, 32, offset=True),
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
        "Q4_1",
    ),
    "ct-int4-ordered": Format(
        packed(4, 32, ordered=True),
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, actorder="group"),
        "Q8_0",
    ),
    "ct-int4-channel": Format(
        packed(4, -1, dtype=torch.float16),
        _compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
        "Q4_0",
    ),
    "ct-int8": Format(int8, _compressed("int-quantized", num_bits=8, type="int", strategy="channel"), "Q8_0"),
    "ct-int8-packed": Format(
        packed(8, -1), _compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), "Q8_0"
    ),
    "mlx-4": Format(mlx(4, 64), {"quantization": {"bits": 4, "group_size": 64}}, "Q4_1", embedded=True),
    "mlx-4-32": Format(mlx(4, 32, torch.float16), {"quantization": {"bits": 4, "group_size": 32}}, "Q4_1"),
    "mlx-8": Format(mlx(8, 64), {"quantization": {"bits": 8, "group_size": 64}}, "", embedded=True),
    "modelopt-nvfp4": Format(
        nvfp4("weight", "weight_scale_2", divides=False),
        _said("modelopt", quant_algo="NVFP4", group_size=16),
        "Q8_0",
    ),
    "ct-nvfp4": Format(
        nvfp4("weight_packed", "weight_global_scale", divides=True),
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "Q8_0",
    ),
    "ct-mxfp4": Format(
        mxfp4, _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), "MXFP4"
    ),
}


def quantised_folders(folder: Path, name: str, into: Path) -> tuple[Path, Path]:
    """Returns two copies of a folder: with its matrices in format ``name``, and with the numbers that these mean."""
    form = FORMATS[name]
    narrow, wide = into / name, into / f"{name}-wide"
    for copy in (narrow, wide):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    small: Parts = {}
    plain: Parts = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        outside = "lm_head" in key or ("embed" in key and not form.embedded)
        if tensor.dim() != 2 or outside or not key.endswith("weight"):
            small[key], plain[key] = tensor, tensor
            continue
        parts, numbers = form.quantise(tensor.float())
        module = key.removesuffix("weight")
        small |= {module + end: part.contiguous() for end, part in parts.items()}
        plain[key] = numbers.contiguous()
    save_file(small, narrow / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, wide / "model.safetensors", metadata={"format": "pt"})
    configure(narrow, form.config)
    return narrow, wide


def configure(folder: Path, settings: Mapping[str, Any]) -> None:
    """Puts settings into a folder's ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | settings))


if __name__ == "__main__":
    print("\n".join(FORMATS))
