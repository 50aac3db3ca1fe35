"""Tests that ``pdserve bench engine`` takes every measurement, on tiny models. Their speed does not matter here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from pdserve.bench.engine import benchmark
from pdserve.bench.engine.benchmark import open_bench
from pdserve.bench.engine.parts import Product, attention_s, products_of
from pdserve.bench.engine.subject import Steps, open_subject
from pdserve.bench.report import read_report, to_json
from pdserve.config import Device, Dtype, ModelConfig
from pdserve.config.bench import BenchEngineConfig, EngineBenchConfig
from pdserve.errors import ConfigError, ModelError
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.recipe import ExpertsRecipe
from pdserve.settings import cache_folder
from pdserve_kernels.contract import BlockFormat
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.rerun_graph import RerunGraphs
from tests.models.tiny_families import save_tiny
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model
from tests.tiny_vocabulary import save_tiny_tokenizer

pytestmark = pytest.mark.usefixtures("small_products")

SMALL = EngineBenchConfig(batches=(1, 3), contexts=(5, 40), chunks=(7, 33), seconds=0.0, copy_mib=1)
IN_BLOCKS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def compiled() -> CompiledKernels:
    return CompiledKernels(cache_folder(os.environ))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))
    save_tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize("dtype", Dtype)
def test_every_measurement_is_there(tiny: Path, tmp_path: Path, dtype: Dtype) -> None:
    model = ModelConfig(served_model_name="tiny", dtype=dtype, device=Device.CPU)
    report = benchmark.run(BenchEngineConfig(engine=SMALL, model=model), tiny, TorchKernels)
    found = [(row.what, *list(row.at.values())[1:]) for row in report.rows if row.what != "hardware"]
    each = [(batch, context) for batch in (1, 3) for context in (5, 40)]
    rooflines = [("roofline", "decode", *one) for one in each] + [("roofline", "prefill", 1, n) for n in (7, 33)]
    decodes = [("decode step", *one) for one in each]
    decodes += [("answers by a schema", batch, 5) for batch in (1, 3)]
    alone = [(what, batch) for what in ("linear layers alone", "sampler") for batch in (1, 3)]
    assert sorted(found, key=str) == sorted(
        [*decodes, *rooflines, *alone, ("prefill step", 7), ("prefill step", 33)], key=str
    )
    # Where there is a GPU, the benchmark measures it too, although the model is on the CPU.
    assert [row.at["device"] for row in report.rows_of("hardware")][:1] == ["cpu"]
    assert all(figure.value > 0 for row in report.rows for figure in row.figures)
    (tmp_path / "engine.json").write_bytes(to_json(report))
    assert read_report(tmp_path / "engine.json") == report


def test_too_long_for_the_model_is_told(tiny: Path) -> None:
    config = BenchEngineConfig(
        engine=EngineBenchConfig(contexts=(100_000,)), model=ModelConfig(served_model_name="tiny")
    )
    with pytest.raises(ConfigError, match="tiny knows 512 positions; 100000 were asked for"):
        benchmark.run(config, tiny, TorchKernels)


def test_a_folder_without_a_tokenizer_has_no_row_of_grammars(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    model = ModelConfig(served_model_name="tiny", dtype=Dtype.FP32, device=Device.CPU)
    report = benchmark.run(BenchEngineConfig(engine=SMALL, model=model), tmp_path, TorchKernels)
    found = {row.what for row in report.rows}
    assert "decode step" in found and "answers by a schema" not in found


def test_the_linear_layers_are_all_of_the_models(tiny: Path) -> None:
    products = products_of(read_family_config(tiny), {})
    loaded = AutoModelForCausalLM.from_pretrained(tiny)
    linears = [module for module in loaded.modules() if isinstance(module, torch.nn.Linear)]
    assert products.parameters == sum(module.weight.numel() for module in linears)
    assert products.nbytes(torch.bfloat16) == 2 * products.parameters


def test_a_model_with_latents_is_measured(tmp_path: Path) -> None:
    steps = Steps((1,), (41,), (42,))
    model = save_tiny("youtu", tmp_path)
    subject = open_subject("tiny", model, ModelConfig(device=Device.CPU, dtype=Dtype.FP32), 16, steps, compiled)
    linears = [
        module
        for module in AutoModelForCausalLM.from_pretrained(model).modules()
        if isinstance(module, torch.nn.Linear)
    ]
    assert products_of(subject.config, {}).parameters == sum(module.weight.numel() for module in linears)
    rows = list(benchmark.subject_rows(open_bench(subject, SMALL), steps))
    assert {"decode step", "prefill step"} <= {row.what for row in rows}
    (decode,) = (row for row in rows if row.what == "decode step")
    assert decode.figure("attention in FP8 : attention").value > 0


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("deepseek-v32", "tokens that an indexer chooses"),
        ("deepseek-v4", "entries for several tokens"),
        ("qwen4-exp", "tokens that an indexer chooses"),
        ("minimax-m3", "blocks that index heads choose"),
    ],
)
def test_a_model_that_attends_to_some_tokens_is_refused(tmp_path: Path, case: str, what: str) -> None:
    model = save_tiny(case, tmp_path)
    with pytest.raises(ModelError, match=f"tiny attends to {what}, and pdserve bench engine"):
        open_subject("tiny", model, ModelConfig(device=Device.CPU), 16, Steps((1,), (41,), (42,)), compiled)


def test_experts_have_rows_with_the_bytes_that_are_touched(tmp_path: Path) -> None:
    steps = Steps((1, 40), (41,), (42,))
    subject = open_subject(
        "tiny", save_tiny_model("qwen3-moe", tmp_path), ModelConfig(device=Device.CPU), 16, steps, compiled
    )
    rows = list(benchmark.subject_rows(open_bench(subject, SMALL), steps))
    experts = subject.config.experts
    assert experts is not None
    one = 3 * experts.expert.channels * subject.config.hidden_size * 2
    layers = sum(isinstance(layer.feed_forward, ExpertsRecipe) for layer in subject.config.recipe.layers)
    single, all_of_them = [row.figure("bytes of those touched").value for row in rows if row.what == "experts alone"]
    assert single == pytest.approx(layers * experts.chosen * one / 2**20)
    assert all_of_them == pytest.approx(layers * experts.count * one / 2**20)
    decode, *_ = [row.figure("bytes").value for row in rows if row.what == "roofline"]
    others = products_of(subject.config, {}).nbytes(torch.bfloat16) + subject.kv_bytes(41)
    assert decode == pytest.approx(single + others / 2**20)


def test_weights_in_blocks_count_as_they_are(tmp_path: Path) -> None:
    config = read_family_config(save_tiny_model("llama", tmp_path / "model", **IN_BLOCKS))
    first = "model.layers.0.self_attn"
    formats = {
        f"{first}.q_proj.weight": BlockFormat.Q8_0,
        f"{first}.k_proj.weight": BlockFormat.Q8_0,
        f"{first}.v_proj.weight": BlockFormat.Q4_1,
        "model.embed_tokens.weight": BlockFormat.Q8_0,
    }
    products = products_of(config, formats)
    hidden, keys = config.hidden_size, config.kv_heads * config.head_dim
    together = config.heads * config.head_dim + keys
    assert products.layers[0][:2] == (
        Product(together, hidden, BlockFormat.Q8_0),
        Product(keys, hidden, BlockFormat.Q4_1),
    )
    assert products.layers[0][0].nbytes(torch.bfloat16) == together * hidden // 32 * 34
    assert Product(64, 256, BlockFormat.NVFP4).nbytes(torch.bfloat16) == 64 * 256 * 4.5 / 8
    assert products.layers[1] == products_of(config, {}).layers[1]
    assert products.head == Product(config.vocab_size, hidden, BlockFormat.Q8_0)


def test_a_model_in_blocks_is_measured_with_products_of_bytes(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", **IN_BLOCKS)
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf", quantized=GGMLQuantizationType.Q8_0, widths=(64, 96))
    subject = open_subject("tiny", path, ModelConfig(device=Device.CPU), 16, Steps((2,), (17,), (20,)), compiled)
    assert set(subject.formats.values()) == {BlockFormat.Q8_0}
    rows = list(benchmark.subject_rows(open_bench(subject, SMALL), Steps((2,), (17,), (20,))))
    (hardware,) = [row for row in rows if row.what == "hardware"]
    assert hardware.figure("product of bytes").value > 0
    decode, prefill = [row for row in rows if row.what == "roofline"]
    assert decode.at == {"model": "tiny", "phase": "decode", "requests": 2, "tokens": 17}
    weights = products_of(subject.config, subject.formats).nbytes(torch.bfloat16)
    kv = 2 * subject.kv_bytes(17)
    assert decode.figure("bytes").value == pytest.approx((weights + kv) / 2**20)
    assert prefill.figure("operations").value > decode.figure("operations").value


def test_requests_of_a_decode_step_share_no_block(tiny: Path) -> None:
    subject = open_subject("tiny", tiny, ModelConfig(), 16, Steps((3,), (40,), (8,)), TorchKernels)
    blocks = [block for row in subject.decode_rows(3, 40) for block in row.block_table]
    assert len(set(blocks)) == len(blocks) == 9
    assert [row.context_len for row in subject.decode_rows(3, 40)] == [40] * 3


def test_attention_of_recorded_steps_is_timed_as_a_replay(tiny: Path) -> None:
    steps = Steps((1, 3), (40,), (33,))
    model = ModelConfig(dtype=Dtype.FP32, device=Device.CPU)
    graphs = RerunGraphs()
    subject = replace(open_subject("tiny", tiny, model, 16, steps, TorchKernels), graphs=graphs)
    assert attention_s(subject, subject.decode_rows(3, 40), 0.0) > 0
    assert [graph.replays > 0 for graph in graphs.made] == [True]
    # A prefill step is not recorded as a graph.
    assert attention_s(subject, subject.prefill_rows(33), 0.0) > 0
    assert len(graphs.made) == 1
