"""A KV cache in FP8: answers do not depend on how they are computed, and are close to those without it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pdserve.config import Dtype, KvCacheDtype
from pdserve.errors import ConfigError
from pdserve.models import latent_plan
from pdserve.models.checkpoint.cached_tokenizer import gguf_tokenizer
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.model_files import packaged_gguf
from pdserve.models.checkpoint.weight_form import cache_item_bytes
from pdserve.models.layer_groups import check_kv_dtype, group_sizes, layer_groups
from pdserve.models.rank_cache import group_specs, rank_sizes
from pdserve.models.runner import ModelRunner, StepRow
from pdserve.settings import cache_folder
from pdserve_kernels.contract import Kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels, CompiledLinear
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.grouped_runner import GroupedRunner
from tests.models.test_quantised_demo import BLOCKS, TEXTS, choices, continued
from tests.models.tiny_families import save_tiny
from tests.tiny_models import random_prompt, save_tiny_model

BLOCK_SIZE = 4
BLOCKS_A_REQUEST = 32
CASES = ("gpt-oss", "gemma2", "ministral", "starcoder2")
"""Sinks and windows, soft caps and windows, layers with and without windows, one group."""
LATENTS = ("deepseek-v3", "glm-moe-dsa")
"""Latents alone, and with index keys by which tokens are chosen, and layers that take the choice of another one."""


@pytest.fixture(scope="module")
def compiled() -> CompiledKernels:
    kernels = CompiledKernels(cache_folder(os.environ))
    if not isinstance(kernels.linear(torch.zeros(32, 32)), CompiledLinear):
        pytest.skip("this CPU has no AVX2")
    return kernels


@pytest.fixture(scope="module", params=(*CASES, *LATENTS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


def runner(folder: Path, dtype: Dtype, kernels: Kernels, kv_dtype: KvCacheDtype = KvCacheDtype.FP8) -> GroupedRunner:
    shape = (dtype, BLOCK_SIZE, 4 * BLOCKS_A_REQUEST, 128)
    return GroupedRunner(folder, read_decoder_config(folder), *shape, kernels, kv_dtype=kv_dtype)


def logits_of(model: ModelRunner, tokens: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
    """Returns the logits after each step of so many ``tokens``."""
    found, start = [], 0
    for count in steps:
        row = StepRow(tokens[start : start + count], start, range(BLOCKS_A_REQUEST), True)
        found.append(model.run([row])[0].clone())
        start += count
    return torch.stack(found)


@pytest.mark.parametrize("dtype", Dtype)
def test_nothing_depends_on_chunks_and_batches(
    folder: Path, compiled: CompiledKernels, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale for several tokens would depend on which of them come together."""
    # Expanded contexts are rounded as their heads' keys and values are, in any cache.
    monkeypatch.setattr(latent_plan, "is_expanded", lambda *_: False)
    prompt, answer = random_prompt(50, seed=1), random_prompt(12, seed=2)
    tokens = [token % read_decoder_config(folder).vocab_size for token in prompt + answer]
    one = runner(folder, dtype, compiled)
    wanted = logits_of(one, tokens, [50, *[1] * 12])
    # Chunks of 3 end where tokens begin to choose: one token alone in a chunk would pass another kernel.
    for chunks in ([25, 25], [3, 7, 2, 38], [16, 16, 18], [*[3] * 16, 2]):
        other = runner(folder, dtype, compiled)
        got = logits_of(other, tokens, [*chunks, *[1] * 12])[len(chunks) - 1 :]
        assert torch.equal(got, wanted)
        # Blocks of windows were given to others by now.
        assert torch.equal(other.kv_cache[: -(-62 // BLOCK_SIZE)], one.kv_cache[: -(-62 // BLOCK_SIZE)])
    replayed = runner(folder, dtype, compiled)
    logits_of(replayed, tokens[:50], [50])
    others = [
        StepRow([i], 0, range(number * BLOCKS_A_REQUEST, (number + 1) * BLOCKS_A_REQUEST), True)
        for i, number in enumerate((1, 2))
    ]
    rows = [StepRow([tokens[at]], at, range(BLOCKS_A_REQUEST), True) for at in range(50, 62)]
    assert torch.equal(replayed.run([*others, *rows])[2:], wanted[1:])


def test_both_cpu_sets_store_nearly_the_same(folder: Path, compiled: CompiledKernels) -> None:
    tokens = [token % read_decoder_config(folder).vocab_size for token in random_prompt(60, seed=3)]
    steps = [40, *[1] * 20]
    logits = [logits_of(runner(folder, Dtype.FP32, kernels), tokens, steps) for kernels in (compiled, TorchKernels())]
    plain = logits_of(runner(folder, Dtype.FP32, compiled, KvCacheDtype.AUTO), tokens, steps)
    off, between = (logits[0] - plain).norm() / plain.norm(), (logits[0] - logits[1]).norm() / plain.norm()
    # Random weights, and experts that are chosen by them, make much of small differences.
    assert 0.01 < off < 0.6, "e4m3 has three bits behind the first one"
    assert between < off / 100, "few numbers are so closely between two of e4m3 that the sets round them apart"


@pytest.mark.parametrize("case", LATENTS)
def test_expanded_contexts_are_the_numbers_that_are_stored(
    tmp_path: Path, compiled: CompiledKernels, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [token % 90 for token in random_prompt(50, seed=4)]
    model = save_tiny(case, tmp_path)
    expanded = logits_of(runner(model, Dtype.FP32, compiled), tokens, [40, 10])
    monkeypatch.setattr(latent_plan, "is_expanded", lambda *_: False)
    kept = logits_of(runner(model, Dtype.FP32, compiled), tokens, [40, 10])
    assert (expanded - kept).norm() < 1e-3 * kept.norm()


@pytest.mark.parametrize("dtype", Dtype)
def test_a_block_has_its_bytes_everywhere(folder: Path, dtype: Dtype) -> None:
    config, fp8 = read_decoder_config(folder), KvCacheDtype.FP8
    sizes = rank_sizes(config, dtype, BLOCK_SIZE, kv_dtype=fp8)
    assert group_sizes(config, cache_item_bytes(dtype, fp8), BLOCK_SIZE) == sizes
    for size, plain, spec in zip(
        sizes, rank_sizes(config, dtype, BLOCK_SIZE), group_specs(config, dtype, BLOCK_SIZE, fp8), strict=True
    ):
        item = cache_item_bytes(dtype, KvCacheDtype.AUTO)
        channels = layer_groups(config).groups[0].numbers
        assert size.block_bytes == plain.block_bytes // item // channels * (channels + 1)
        assert (spec.heads * spec.head_bytes, spec.dtype) == (size.block_bytes, "fp8")


@pytest.mark.parametrize(
    ("case", "what"),
    [("mamba2", "recurrent states"), ("fallback", "transformers"), ("glm5", "pools")],
)
def test_what_has_no_form_in_fp8_is_refused_by_name(tmp_path: Path, case: str, what: str) -> None:
    if case == "glm5":
        kinds = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "indexer_types": ["full"]}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm5_next"} | kinds))
        folder = tmp_path
    else:
        folder = save_tiny_model("bitnet", tmp_path) if case == "fallback" else save_tiny(case, tmp_path)
    config = read_decoder_config(folder)
    check_kv_dtype(config, KvCacheDtype.AUTO)
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype fp8 is not for .*{what}"):
        check_kv_dtype(config, KvCacheDtype.FP8)


@pytest.mark.integration
def test_the_demo_model_chooses_the_tokens_that_it_chooses_without(demo_model: Path, compiled: CompiledKernels) -> None:
    tokenizer, config = gguf_tokenizer(packaged_gguf()), read_decoder_config(demo_model)
    prompts: list[list[int]] = [tokenizer.encode(text) for text in TEXTS]

    def opened(kv_dtype: KvCacheDtype) -> ModelRunner:
        shape = (Dtype.BF16, 16, BLOCKS * len(TEXTS), 128)
        return ModelRunner(demo_model, config, *shape, compiled, kv_dtype=kv_dtype)

    plain, fp8 = opened(KvCacheDtype.AUTO), opened(KvCacheDtype.FP8)
    answers = continued(plain, prompts)
    same = (torch.tensor(choices(fp8, prompts, answers)) == torch.tensor(answers)).float().mean()
    logits = [model.run([StepRow(prompts[0], 0, range(BLOCKS), True)])[0] for model in (plain, fp8)]
    # Measured: 0.974 of the tokens, and logits that are 0.118 of their norm apart.
    assert same >= 0.94
    assert (logits[0] - logits[1]).norm() < 0.2 * logits[0].norm()
