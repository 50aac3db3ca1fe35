"""Tests what ``pdserve plan memory`` says of a KV cache: exact numbers, and those of caches that engines make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pdserve.bench.report import read_report
from pdserve.cli.main import main
from pdserve.config import CacheConfig, Dtype
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.errors import PlanError
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.layer_groups import GroupSize, Load, group_blocks
from pdserve.models.rank_cache import cache_place, group_specs
from pdserve.models.runner import ModelRunner
from pdserve.models.sizes import draft_blocks
from pdserve.plan.memory import CacheNeed, cache_need, least_mib, requests_at_once
from pdserve.wire.cache_groups import Keep, moved_blocks
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.engine.fake_model import groups_of
from tests.engine.scheduling.test_scheduler import BLOCK_SIZE as BENCH_BLOCK
from tests.engine.scheduling.test_scheduler import Bench
from tests.models.tiny_families import save_tiny
from tests.tiny_models import save_tiny_model

BLOCK_SIZE = 16
KIB, MIB = 2**10, 2**20
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
"""As gpt-oss-20b."""
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151_936,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
}
"""As Qwen3-Next-80B-A3B."""
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 262_208,
    "sliding_window": 1024,
    "max_position_embeddings": 131_072,
}
"""As the text part of Gemma-3-12B."""


def decoder_of(config: dict[str, Any], folder: Path) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_decoder_config(folder)


def need_of(config: dict[str, Any], folder: Path, prompt: int = 4096) -> CacheNeed:
    load = Load(requests=64, step_tokens=2048, context=32_768, asked=32_768)
    return cache_need(decoder_of(config, folder), 2, BLOCK_SIZE, load, prompt)


def test_the_numbers_of_alternating_windows(tmp_path: Path) -> None:
    """Twelve layers of each kind: 2 · 12 · 8 · 64 numbers of two bytes are 24 KiB a token."""
    whole, window = need_of(GPT_OSS, tmp_path).groups
    assert (whole.keep, whole.token_bytes, whole.block_bytes) == (Keep.ALL, 24 * KIB, 384 * KIB)
    assert (whole.context_bytes, whole.step_bytes, whole.moved_bytes) == (768 * MIB, 0, 96 * MIB)
    assert (window.keep, window.window, window.token_bytes) == (Keep.WINDOW, 128, 0)
    assert window.context_bytes == (128 // 16 + 2) * 384 * KIB
    assert window.step_bytes == 2048 // 16 * 384 * KIB
    assert window.moved_bytes == 128 // 16 * 384 * KIB
    assert window.batch_bytes(64) == (64 * 10 + 128) * 384 * KIB


def test_the_numbers_of_states(tmp_path: Path) -> None:
    """36 layers: 32 heads of 128 × 128 numbers, and of the convolution three of 8192 channels, in fp32."""
    whole, state = need_of(QWEN3_NEXT, tmp_path).groups
    assert (whole.token_bytes, whole.moved_bytes) == (2 * 12 * 2 * 256 * 2, 4096 * 24 * KIB)
    one = 36 * (32 * 128 * 128 + 3 * 8192) * 4
    assert (state.keep, state.block_bytes, state.token_bytes) == (Keep.LATEST, one, 0)
    assert (state.context_bytes, state.step_bytes, state.moved_bytes) == (2 * one, 0, one)
    assert state.batch_bytes(64) == 128 * one


def test_the_numbers_of_a_large_window(tmp_path: Path) -> None:
    """Eight layers of 48 see everything."""
    whole, window = need_of(GEMMA3, tmp_path, prompt=500).groups
    assert (whole.token_bytes, window.block_bytes) == (64 * KIB, 16 * 320 * KIB)
    assert window.context_bytes == (64 + 2) * 16 * 320 * KIB
    assert (whole.moved_bytes, window.moved_bytes) == (32 * MIB, 32 * 16 * 320 * KIB), "a prompt within the window"


@pytest.mark.parametrize("config", [GPT_OSS, QWEN3_NEXT, GEMMA3], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("requests", [1, 8, 200])
def test_the_smallest_cache_holds_them_all_and_one_mib_less_does_not(
    tmp_path: Path, config: dict[str, Any], requests: int
) -> None:
    decoder = decoder_of(config, tmp_path)
    load = Load(requests, step_tokens=512, context=4096, asked=4096)
    need = cache_need(decoder, 2, BLOCK_SIZE, load, 1)
    assert need.requests >= requests
    assert need.mib * MIB >= sum(group.batch_bytes(requests) for group in need.groups) - need.groups[-1].step_bytes
    assert cache_need(decoder, 2, BLOCK_SIZE, load, 1, mib=need.mib - 1).requests < requests


def test_a_cache_that_nobody_has_is_refused() -> None:
    with pytest.raises(PlanError, match="no KV cache holds 1 contexts of 1,048,576 tokens"):
        least_mib([GroupSize(Keep.ALL, 2**40)], BLOCK_SIZE, Load(1, 16, 2**20))


# ------------------------------------------------------------ what engines make


@pytest.mark.parametrize(
    "case",
    [
        "gpt-oss",
        "gemma2",
        "gemma3n",
        "gemma4",
        "qwen3-next",
        "kimi-linear",
        "nemotron-h",
        "lfm2",
        "llama4",
        "deepseek-v32",
        "deepseek-v4",
        "qwen4-exp",
    ],
)
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP32])
def test_an_engines_cache_has_these_sizes(tmp_path: Path, case: str, dtype: Dtype) -> None:
    decoder = read_decoder_config(save_tiny(case, tmp_path))
    load, size, prompt = Load(4, 32, 64), 4, 37
    need = cache_need(decoder, 2 if dtype is Dtype.BF16 else 4, size, load, prompt, mib=1)
    groups, end = cache_place(decoder, dtype, size, need.blocks)
    assert end <= MIB
    assert [group.block_bytes for group in need.groups] == [group.block_bytes for group in groups]
    assert [(group.name, group.window) for group in need.groups] == [
        (group.spec.name, group.spec.window) for group in groups
    ]
    moved = moved_blocks(group_specs(decoder, dtype, size), size, 0, prompt)
    assert sum(group.moved_bytes for group in need.groups) == sum(groups[block.group].block_bytes for block in moved)


@pytest.mark.parametrize("case", ["gpt-oss", "gemma2", "qwen3-next"])
@pytest.mark.parametrize("step", [1, 3, 11])
def test_an_engine_holds_no_more_of_a_context_and_of_states_as_much(tmp_path: Path, case: str, step: int) -> None:
    decoder, size, context = read_decoder_config(save_tiny(case, tmp_path)), 4, 64
    need = cache_need(decoder, 4, size, Load(1, step, context), 1, mib=8)
    groups, _ = cache_place(decoder, Dtype.FP32, size, need.blocks)
    blocks = BlockManager(need.blocks[0], size, bounded=groups[1:], block_bytes=groups[0].block_bytes)
    table, between, within = BlockTable(), [0] * len(groups), [0] * len(groups)
    for computed in range(0, context - step, step):
        assert blocks.grow(table, computed + step)
        assert blocks.grow_bounded(table, computed, computed + step)
        within = list(map(max, within, [len(table), *table.num_bounded()]))
        blocks.next_states(table)
        blocks.give_back(table, computed + step)
        between = list(map(max, between, [len(table), *table.num_bounded()]))
    for group, held, most in zip(need.groups, between, within, strict=True):
        assert held * group.block_bytes <= group.context_bytes
        assert most * group.block_bytes <= group.context_bytes + group.step_bytes
        if group.keep is Keep.LATEST:
            assert most * group.block_bytes == group.context_bytes


@pytest.mark.parametrize(("keep", "window", "count"), [(Keep.LATEST, 0, 7), (Keep.LATEST, 0, 9), (Keep.WINDOW, 8, 23)])
def test_a_scheduler_runs_as_many_requests_at_once(keep: Keep, window: int, count: int) -> None:
    groups = groups_of([(keep, window, count)], 64)
    bench = Bench(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=8, groups=groups)
    for local_id in range(8):
        bench.add(local_id, prompt=6, max_tokens=18)
    most = 0
    while len(bench.endings) < 8:
        most = max(most, len(bench.step().work))
    sizes = [GroupSize(group.spec.keep, group.block_bytes, group.spec.window) for group in groups]
    load = Load(8, step_tokens=8, context=24)
    assert most == requests_at_once(sizes, [64, count], BENCH_BLOCK, load)
    assert bench.scheduler.counters.preemptions == 0


# ------------------------------------------------------------ the command


def run(folder: Path, *argv: str) -> int:
    return main(["plan", "memory", "--model", str(folder), *argv], {})


def test_the_command_shows_each_group_and_all_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder_of(GPT_OSS, tmp_path)
    file = tmp_path / "memory.json"
    argv = ["--max-num-seqs", "64", "--max-model-len", "32768", "--max-num-batched-tokens", "2048"]
    assert run(tmp_path, *argv, "--moved-tokens", "4096", "--json", str(file)) == 0
    need = need_of(GPT_OSS, tmp_path)
    assert f"the smallest cache that holds them all at once: --kv-cache-mib {need.mib}\n" in capsys.readouterr().out
    whole, window, both = read_report(file).rows
    assert whole.at == {"group": "whole contexts", "keeps": "every block"}
    assert window.at == {"group": "window 128", "keeps": "last 128 tokens"}
    assert [row.figure("a prompt moves").value for row in (whole, window, both)] == [96.0, 3.0, 99.0]
    assert both.figure("a batch").value == 64 * 768 + 288
    assert run(tmp_path, *argv, "--kv-cache-mib", "1024") == 0
    blocks = group_blocks(
        [GroupSize(Keep.ALL, 384 * KIB), GroupSize(Keep.WINDOW, 384 * KIB, 128)],
        BLOCK_SIZE,
        1024 * MIB,
        Load(64, 2048, 32_768, 32_768),
    )
    assert f"--kv-cache-mib 1024 holds {blocks[0] // 2048} of them at once" in capsys.readouterr().out


def test_a_model_with_one_group_has_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder_of(GEMMA3 | {"model_type": "llama", "max_position_embeddings": 1024}, tmp_path)
    assert run(tmp_path, "--max-num-seqs", "2", "--json", "-") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["at"] == {"group": "whole contexts", "keeps": "every block"}
    assert [figure["value"] for figure in row["figures"]][:3] == [6144.0, 384.0, 384.0]


def test_a_draft_model_has_a_row_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its numbers are those of the runner that an engine makes of it."""
    decoder_of(GPT_OSS, tmp_path)
    other = save_tiny_model("llama", tmp_path / "small")
    argv = ["--max-num-seqs", "2", "--draft-model", str(other), "--dtype", "float32", "--json", "-"]
    assert run(tmp_path, *argv) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[-1]["at"] == {"model": "small"}
    weights, cache, both = (figure["value"] * MIB for figure in rows[-1]["figures"])
    kernels, block_size = TorchKernels(), CacheConfig().block_size
    runner = ModelRunner(
        other, read_decoder_config(other), Dtype.FP32, block_size, draft_blocks(block_size), 64, kernels
    )
    assert cache == runner.kv_cache.nbytes
    assert weights == sum(tensor.nbytes for tensor in load_file(other / "model.safetensors").values())
    assert both == weights + cache
    # Settings that do not use it do not count it.
    assert run(tmp_path, *argv, "--speculation", "off") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(rows) - 1


def test_what_is_missing_or_too_long_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder_of(GPT_OSS, tmp_path)
    assert run(tmp_path) == 2
    assert "how many requests at once? --max-num-seqs is needed" in capsys.readouterr().err
    assert run(tmp_path, "--max-num-seqs", "1", "--max-model-len", "200000") == 2
    assert "the model knows only 131072 positions" in capsys.readouterr().err
    assert main(["plan", "memorie"], {}) == 2
    assert "the word profile or memory; 'memorie' is none of them" in capsys.readouterr().err
