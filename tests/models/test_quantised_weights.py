"""Folders of quantised weights: each number is the one that the format means, also in parts and in blocks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from pdserve.config import CpuKernels, Dtype, ModelConfig, Weights
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config, read_family_config
from pdserve.models.checkpoint.fingerprint import fingerprint
from pdserve.models.checkpoint.safetensors.dequantising import LARGEST_SHIFT, MOST_ADDED
from pdserve.models.checkpoint.safetensors.files import SafetensorsFiles
from pdserve.models.checkpoint.weight_form import gpu_weight_bytes, parameters, weight_bytes, weights_words
from pdserve.models.checkpoint.weights import ALL, Checkpoint, block_formats, stays_in_blocks
from pdserve.models.parts.projections import Building
from pdserve.models.runner import StepRow
from pdserve.settings import cache_folder
from pdserve_kernels.contract import BLOCK_FORMATS, BlockFormat, BlockWeight
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from tests.kernels.random_blocks import dequantised
from tests.models.greedy import small_runner
from tests.models.grouped_runner import GroupedRunner
from tests.models.quantisers import FORMATS, configure, quantised_folders
from tests.models.rank_program import Case
from tests.models.test_tensor_parallel import computed
from tests.models.tiny_families import save_tiny
from tests.models.unsummed import Unsummed
from tests.tiny_models import save_tiny_model

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"head_dim": 32}
PROMPT = list(range(20, 57))
DOWN = "model.layers.1.mlp.down_proj.weight"
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("tiny"), **SHAPE)


@pytest.fixture(scope="module", params=FORMATS)
def each(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Folders]:
    return request.param, quantised_folders(tiny, request.param, tmp_path_factory.mktemp("each"))


def folders(tiny: Path, tmp_path: Path, name: str) -> Folders:
    return quantised_folders(tiny, name, tmp_path)


def files_of(folder: Path) -> SafetensorsFiles:
    return SafetensorsFiles(folder, read_family_config(folder).quantisation)


def logits(folder: Path) -> torch.Tensor:
    return small_runner(folder).run([StepRow(PROMPT, 0, range(16), True)])


def test_each_number_is_the_one_that_the_format_means(each: tuple[str, Folders]) -> None:
    _, (narrow, wide) = each
    files, wanted = files_of(narrow), load_file(wide / "model.safetensors")
    assert set(files.names()) == wanted.keys()
    files.check_formats()
    for name, numbers in wanted.items():
        assert files.shape(name) == numbers.shape
        assert torch.equal(files.read(name, ALL, ALL, torch.float32), numbers), name


def test_a_part_has_the_numbers_that_it_has_in_the_whole(each: tuple[str, Folders]) -> None:
    """Ranks take such parts: they cut words, bytes and blocks of scales wherever these lie."""
    _, (narrow, wide) = each
    files, wanted = files_of(narrow), load_file(wide / "model.safetensors")[DOWN]
    for rows, columns in (
        (slice(0, 64), ALL),
        (slice(5, 90), slice(96, 192)),
        (slice(127, 128), slice(1, 131)),
        (ALL, slice(64, 128)),
        (slice(128, 128), ALL),
    ):
        assert torch.equal(files.read(DOWN, rows, columns, torch.float32), wanted[rows, columns])


def test_a_model_has_the_logits_of_its_numbers(each: tuple[str, Folders]) -> None:
    _, (narrow, wide) = each
    torch.testing.assert_close(logits(narrow), logits(wide), rtol=1e-5, atol=1e-5)


def test_blocks_are_as_near_as_the_table_says(each: tuple[str, Folders]) -> None:
    name, (narrow, wide) = each
    blocks, usual = FORMATS[name].blocks, ModelConfig()
    found = block_formats(narrow)
    assert {kind.name for kind in found.values()} == ({blocks} if blocks else set())
    assert stays_in_blocks(narrow, usual, kernels=True) == bool(blocks)
    assert not stays_in_blocks(narrow, usual, kernels=False)
    assert not stays_in_blocks(narrow, ModelConfig(dtype=Dtype.FP32), kernels=True)
    assert not stays_in_blocks(narrow, ModelConfig(weights=Weights.DEQUANTISE), kernels=True)
    files, wanted = files_of(narrow), load_file(wide / "model.safetensors")
    for tensor, kind in found.items():
        weight, numbers = files.read_blocks(tensor, ALL, ALL), wanted[tensor]
        assert weight is not None, tensor
        assert weight.format is kind
        apart = read(weight) - numbers
        if blocks in ("Q4_0", "MXFP4") or "int8" in name:
            assert not apart.any()
        elif blocks == "Q4_1" or name == "gptq-8":
            # Neighbouring numbers of a group are at least a step apart.
            step = numbers.reshape(len(numbers), -1, 32).sort(-1).values.diff(dim=-1)
            least = torch.where(step > 1e-6, step, torch.inf).amin(-1, keepdim=True)
            assert (apart.reshape(len(apart), -1, 32).abs() <= LARGEST_SHIFT * least).all()
        else:
            assert apart.norm() <= MOST_ADDED * numbers.norm()


def test_a_gpu_has_the_numbers_of_the_format(each: tuple[str, Folders]) -> None:
    """Those that a CPU rounds to Q8_0 stay as they are, also in parts, which cut the scales of 128 numbers."""
    _, (narrow, wide) = each
    files, wanted = files_of(narrow), load_file(wide / "model.safetensors")
    found = {name for name, kind in files.block_formats(on_gpu=True).items() if kind not in BLOCK_FORMATS}
    assert stays_in_blocks(narrow, ModelConfig(), kernels=True, on_gpu=True)
    for name in found:
        for rows, columns in ((ALL, ALL), (slice(5, 70), slice(32, 96)), (ALL, slice(0, 128))):
            weight, numbers = files.read_blocks(name, rows, columns, on_gpu=True), wanted[name][rows, columns]
            assert weight is not None, name
            assert weight.format not in BLOCK_FORMATS
            torch.testing.assert_close(dequantised(weight), numbers, rtol=1e-6, atol=1e-7)


def test_weights_alone_in_fp8_are_no_blocks_that_a_gpu_multiplies_in_fp8(tiny: Path, tmp_path: Path) -> None:
    """The file says whether inputs are rounded. A share that cuts a scale is multiplied by inputs as they are."""
    narrow, _ = folders(tiny, tmp_path, "ct-fp8")

    def kinds() -> list[BlockFormat]:
        found = (files_of(narrow).read_blocks(DOWN, ALL, part, on_gpu=True) for part in (slice(0, 128), slice(0, 96)))
        return [weight.format for weight in found if weight is not None]

    assert kinds() == [BlockFormat.FP8, BlockFormat.FP8_SHORT]
    said = json.loads((narrow / "config.json").read_text())
    said["quantization_config"]["config_groups"]["0"]["input_activations"] = None
    (narrow / "config.json").write_text(json.dumps(said))
    assert kinds() == [BlockFormat.FP8_SHORT] * 2


def test_fp8_that_is_not_a_number_leaves_a_weight_dequantised(tiny: Path, tmp_path: Path) -> None:
    narrow, _ = folders(tiny, tmp_path, "fp8-blocks")
    rewrite(narrow, DOWN, lambda codes: codes.view(torch.uint8).index_fill(1, torch.tensor([3]), 255).view(codes.dtype))
    files = files_of(narrow)
    assert files.read_blocks(DOWN, ALL, ALL, on_gpu=True) is None
    assert files.read_blocks(DOWN.replace("down", "up"), ALL, ALL, on_gpu=True) is not None


def read(weight: BlockWeight) -> torch.Tensor:
    """Returns the numbers that the ``gguf`` package reads from blocks."""
    plain = dequantize(weight.blocks.numpy(), GGMLQuantizationType(int(weight.format)))
    return torch.from_numpy(plain.astype(np.float32))


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq", "ct-mxfp4", "mlx-4", "mlx-8"])
def test_a_model_in_blocks_has_nearly_the_logits_of_its_numbers(tiny: Path, tmp_path: Path, name: str) -> None:
    narrow, wide = folders(tiny, tmp_path, name)
    kernels = CompiledKernels(cache_folder(os.environ))
    found = []
    for folder in (narrow, wide):
        config = read_decoder_config(folder)
        own = GroupedRunner(folder, config, Dtype.BF16, 4, 32, 128, kernels, block_kernels=kernels)
        found.append(own.run([StepRow(PROMPT, 0, range(16), True)]).clone())
    kept, plain = found
    # Eight bits with an offset are no blocks. Inputs of others are rounded to bytes.
    assert torch.equal(kept, plain) == (not FORMATS[name].blocks)
    assert (kept - plain).norm() / plain.norm() < 0.15


@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq", "gptq-ordered", "modelopt-nvfp4"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_their_share(tiny: Path, tmp_path: Path, name: str, size: int) -> None:
    """Four ranks have 48 columns each, which are no whole blocks; two have 96, which cut the scales of FP8."""
    narrow, wide = folders(tiny, tmp_path, name)
    kernels, quantisation = CompiledKernels(cache_folder(os.environ)), read_family_config(narrow).quantisation
    x, each = torch.randn(4, 192).bfloat16(), 192 // size
    total = torch.zeros(4, 128)
    for rank in range(size):
        mine = slice(rank * each, (rank + 1) * each)
        checkpoint = Checkpoint(narrow, torch.bfloat16, quantisation=quantisation)
        building = Building(checkpoint, kernels, Unsummed(rank, size), kernels)
        weight = building.weight(DOWN, (128, 192), columns=mine)
        assert isinstance(weight, BlockWeight) == (each % 32 == 0)
        total += building.linear(weight)(x[:, mine].contiguous()).float()
    wanted = x.float() @ load_file(wide / "model.safetensors")[DOWN].T
    assert (total - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("deepseek-v3", "fp8-blocks"),
        ("phi3", "ct-fp8"),
        pytest.param("deepseek-v32", "fp8-blocks", marks=pytest.mark.nightly),
        pytest.param("minimax-m2", "fp8-blocks", marks=pytest.mark.nightly),
        pytest.param("glm4-moe", "fp8-blocks", marks=pytest.mark.nightly),
        pytest.param("mimo", "fp8-blocks", marks=pytest.mark.nightly),
        pytest.param("gpt2", "modelopt-fp8", marks=pytest.mark.nightly),
        pytest.param("qwen3-next", "ct-fp8", marks=pytest.mark.nightly),
        pytest.param("kimi-linear", "fp8-blocks", marks=pytest.mark.nightly),
        pytest.param("deepseek-v4", "fp8-blocks", marks=pytest.mark.nightly),
        pytest.param("qwen4-exp", "fp8-blocks", marks=pytest.mark.nightly),
    ],
)
def test_a_family_has_the_logits_of_its_numbers(tmp_path: Path, case: str, name: str) -> None:
    """Latents, fused rows, experts, weights that are stored as ``[in, out]``, states."""
    narrow, wide = quantised_folders(save_tiny(case, tmp_path / "tiny"), name, tmp_path)
    torch.testing.assert_close(logits(narrow), logits(wide), rtol=1e-5, atol=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", ["fp8-blocks", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("awq", "gptq-ordered"))]
)
def test_ranks_give_the_tokens_of_one_rank(tiny: Path, tmp_path: Path, name: str) -> None:
    narrow, _ = folders(tiny, tmp_path, name)
    alone, split = computed([Case(str(narrow), size, [PROMPT[:6], PROMPT[3:20]], 5) for size in (1, 2)])
    assert not alone.error
    assert split == alone


def test_rounding_that_adds_too_much_leaves_a_weight_dequantised(tiny: Path, tmp_path: Path) -> None:
    narrow, _ = folders(tiny, tmp_path, "fp8-static")
    # One number of each block is so large that a half of its step is the others' size.
    outliers = torch.arange(0, 192, 32)
    rewrite(narrow, DOWN, lambda codes: torch.full(codes.shape, 1.75).index_fill(1, outliers, 448.0))
    files = files_of(narrow)
    assert files.read_blocks(DOWN, ALL, ALL) is None
    assert files.read_blocks(DOWN.replace("down", "up"), ALL, ALL) is not None
    assert logits(narrow).isfinite().all()


@pytest.mark.parametrize(("name", "part", "scale"), [("awq", "scales", 1e-7), ("ct-int4", "weight_scale", 1e5)])
def test_scales_beyond_16_bits_leave_a_weight_dequantised(
    tiny: Path, tmp_path: Path, name: str, part: str, scale: float
) -> None:
    narrow, _ = folders(tiny, tmp_path, name)
    tensor = DOWN.removesuffix("weight") + part
    rewrite(narrow, tensor, lambda scales: torch.full_like(scales, scale, dtype=torch.bfloat16), torch.bfloat16)
    files = files_of(narrow)
    assert files.read_blocks(DOWN, ALL, ALL) is None
    assert files.read_blocks(DOWN.replace("down", "up"), ALL, ALL) is not None


def test_zeros_that_are_not_in_the_middle_are_no_symmetric_weight(tiny: Path, tmp_path: Path) -> None:
    narrow, wide = folders(tiny, tmp_path, "gptq-offset")
    configure(narrow, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}})
    files = files_of(narrow)
    assert files.read_blocks(DOWN, ALL, ALL) is None
    assert torch.equal(files.read(DOWN, ALL, ALL, torch.float32), load_file(wide / "model.safetensors")[DOWN])


@pytest.mark.parametrize(
    ("name", "bits", "on_gpu", "words"),
    [
        ("awq", 5.0, 5.0, "awq, in Q4_1"),
        ("mlx-8", 16.0, 10.0, "mlx, in bfloat16"),
        ("ct-nvfp4", 8.5, 4.5, "compressed-tensors, in Q8_0"),
    ],
)
def test_memory_is_that_of_what_weights_become(
    tiny: Path, tmp_path: Path, name: str, bits: float, on_gpu: float, words: str
) -> None:
    narrow, wide = folders(tiny, tmp_path, name)
    tensors, parts = load_file(wide / "model.safetensors"), ("_proj", "embed") if name == "mlx-8" else ("_proj",)
    quantised = {each for each in tensors if any(part in each for part in parts)}
    numbers = sum(tensors[each].numel() for each in quantised)
    others = sum(tensor.numel() for each, tensor in tensors.items() if each not in quantised)
    model = ModelConfig()
    assert parameters(narrow) == numbers + others
    assert weight_bytes(narrow, model, CpuKernels.AUTO) == 2 * others + numbers * bits / 8
    assert gpu_weight_bytes(narrow, model) == 2 * others + numbers * on_gpu / 8
    assert gpu_weight_bytes(narrow, ModelConfig(weights=Weights.DEQUANTISE)) == 2 * (others + numbers)
    assert weight_bytes(narrow, model, CpuKernels.TORCH) == 2 * (others + numbers)
    assert weights_words(narrow, model) == words
    assert weights_words(narrow, ModelConfig(dtype=Dtype.FP32)) == f"{words.split(',')[0]}, widened to float32"
    if name == "ct-nvfp4":
        assert weights_words(narrow, model, on_gpu=True) == "compressed-tensors, in NVFP4"


def test_the_fingerprint_names_the_form(tiny: Path, tmp_path: Path) -> None:
    narrow, _ = folders(tiny, tmp_path, "awq")
    assert fingerprint(narrow, in_blocks=True) == "blocks-" + fingerprint(narrow)


def rewrite(folder: Path, name: str, change: object, dtype: torch.dtype | None = None) -> None:
    """Changes a tensor of a folder, or removes it."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if callable(change):
        tensors[name] = change(tensors[name]).to(dtype or tensors[name].dtype).contiguous()
    else:
        del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


def first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1]


def backwards(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0)


MISFITS = [
    ("fp8-blocks", "weight_scale_inv", None, r"down_proj\.weight' .* has 0 of"),
    ("fp8-blocks", "weight_scale_inv", torch.t, r"weight_scale_inv' of shape \[2, 1\] .* does not fit"),
    ("awq", "qzeros", None, r"there is no tensor '.*down_proj\.qzeros'"),
    ("awq", "scales", first, r"scales' of shape \[1, 128\].* \[3, 128\]"),
    ("gptq", "g_idx", first, r"g_idx' of shape \[1\]"),
    ("gptq-ordered", "g_idx", None, r"desc_act, and there is no"),
    ("ct-int4", "weight_scale", first, r"scales of shape \[1, 6\] it fits 0 schemes"),
    ("ct-int4", "weight_shape", backwards, r"weight_shape' says \[192, 128\]"),
    ("ct-int4-offset", "weight_zero_point", first, r"weight_zero_point' of shape \[1, 6\]"),
    ("mlx-4", "biases", None, r"there is no tensor '.*down_proj\.biases'"),
    ("modelopt-nvfp4", "weight_scale_2", None, r"there is no tensor '.*weight_scale_2'"),
    ("ct-mxfp4", "weight_scale", first, r"weight_scale' of shape \[1, 6\]"),
    (
        "mxfp4-pairs",
        "scale",
        first,
        r"MXFP4 needs a scale in F8_E8M0 for each 32 numbers of a row in .*down",
    ),
]


@pytest.mark.parametrize(("name", "part", "change", "match"), MISFITS)
def test_what_does_not_fit_is_named_before_weights_are_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str, change: object, match: str
) -> None:
    narrow, _ = folders(tiny, tmp_path, name)
    rewrite(narrow, DOWN.removesuffix("weight") + part, change)
    monkeypatch.setattr(SafetensorsFiles, "read", None)
    with pytest.raises(ModelError, match=match):
        small_runner(narrow)


def test_groups_beyond_those_that_are_there_are_named(tiny: Path, tmp_path: Path) -> None:
    narrow, _ = folders(tiny, tmp_path, "gptq-ordered")
    rewrite(narrow, DOWN.removesuffix("weight") + "g_idx", lambda order: order + 1)
    with pytest.raises(ModelError, match=r"g_idx' names groups beyond the 6"):
        small_runner(narrow)


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("ct-int8", {"ignore": ["re:.*down_proj"]}, r"lists 'model\.layers\.0\.mlp\.down_proj'"),
        ("modelopt-fp8", {"ignore": ["model.layers.1.mlp*"]}, r"lists 'model\.layers\.1\.mlp"),
        ("fp8-blocks", {"modules_to_not_convert": ["model.layers.1.mlp.up_proj"]}, r"lists 'model\.layers\.1\.mlp\.up"),
    ],
)
def test_a_module_that_is_listed_as_not_quantised_and_is(
    tiny: Path, tmp_path: Path, name: str, settings: dict[str, object], match: str
) -> None:
    narrow, _ = folders(tiny, tmp_path, name)
    configure(narrow, {"quantization_config": {**FORMATS[name].config["quantization_config"], **settings}})
    with pytest.raises(ModelError, match=match):
        small_runner(narrow)


def test_weights_that_are_not_quantised_although_they_are_said_to_be(tiny: Path, tmp_path: Path) -> None:
    narrow, wide = folders(tiny, tmp_path, "awq")
    configure(wide, FORMATS["awq"].config)
    with pytest.raises(ModelError, match=r"config\.json says that weights are quantised \(awq\), and no tensor is"):
        small_runner(wide)
    config = (narrow / "config.json").read_text().replace("quantization_config", "nothing")
    (narrow / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"are quantised, and nothing says how|lacks|no tensor"):
        small_runner(narrow)
