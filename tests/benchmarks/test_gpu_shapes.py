"""Tests ``benchmarks gpu-shapes`` with tiny models on a CPU. Their speed does not matter here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_shapes import benchmark
from benchmarks.gpu_shapes.drafting import Drafting, FakeDrafter
from benchmarks.random_llama import Shape, Stored, write_random_model
from benchmarks.settings import BenchGpuShapesConfig
from pdserve.bench.engine.parts import ExpertLayer, Product
from pdserve.bench.engine.subject import Steps, open_subject
from pdserve.config import Device, Dtype, ModelConfig
from pdserve.config.bench import EngineBenchConfig
from pdserve.errors import BenchError
from pdserve.models.backend import Backend
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.weights import Checkpoint
from pdserve.models.recipe import ExpertsRecipe, MlpRecipe
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.tiny_models import save_tiny_model

SMALL = EngineBenchConfig(seconds=0.0, copy_mib=1)
SHAPE = Shape(64, 96, 2, 4, 2, 16, 300, 256)


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.bench.engine.parts._SIDE", {"cpu": 64, "cuda": 64})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def test_experts_are_measured_without_a_model() -> None:
    layer = ExpertLayer(ExpertsRecipe(8, 2, MlpRecipe(16)), (Product(16, 32), Product(16, 32)), Product(32, 16))
    config, backend = BenchGpuShapesConfig(SMALL), Backend(torch.device("cpu"), TorchKernels(), None)
    rows = list(benchmark.experts_rows(config, "tiny", layer, 3, (1, 40), backend))
    assert [row.at for row in rows] == [{"model": "tiny", "batch": 1}, {"model": "tiny", "batch": 40}]
    assert rows[0].figure("bytes of those touched").value == 3 * 2 * 3 * 16 * 32 * 2 / 2**20
    assert all(row.figure("rate : matrix product").value > 0 for row in rows)


@pytest.mark.parametrize("stored", Stored)
def test_a_random_model_is_one_that_the_engine_runs(stored: Stored, tmp_path: Path) -> None:
    write_random_model(SHAPE, tmp_path, stored)
    weight = Checkpoint(tmp_path, torch.float32, quantisation=read_family_config(tmp_path).quantisation).take(
        "model.layers.0.mlp.up_proj.weight", (SHAPE.intermediate_size, SHAPE.hidden_size)
    )
    assert 0.01 < float(weight.std()) < 0.03
    steps = Steps(batches=(2,), contexts=(17,), chunks=(20,))
    subject = open_subject("random", tmp_path, ModelConfig(), 16, steps, TorchKernels)
    assert subject.config.vocab_size == 300
    assert subject.runner.kv_cache.shape[0] == steps.blocks(16) == 4
    logits = subject.runner.run(subject.decode_rows(2, 17))
    assert logits.shape == (2, 300)
    assert logits.isfinite().all()
    assert subject.runner.run(subject.prefill_rows(20)).shape == (1, 300)


def test_a_random_model_is_measured_like_any_other() -> None:
    rows = benchmark.random_model_rows(
        BenchGpuShapesConfig(SMALL), "random", SHAPE, Steps((2,), (17,), (20,)), TorchKernels
    )
    kinds = ["hardware", "linear layers alone", "decode step", "roofline", "sampler", "prefill step", "roofline"]
    assert [row.what for row in rows] == kinds
    assert all(row.at["model"] == "random" for row in rows[1:])


DRAFTING = Drafting(requests=(1, 3), rows=(2, 4), context=40, acceptances=(0.0, 0.5, 1.0))


def test_steps_with_drafts_have_rows_beside_steps_without() -> None:
    steps = Steps((1,), (40,), (33,))
    config = BenchGpuShapesConfig(SMALL, model=ModelConfig(dtype=Dtype.FP32, device=Device.CPU))
    found = [
        row
        for row in benchmark.random_model_rows(config, "tiny", SHAPE, steps, TorchKernels, drafting=DRAFTING)
        if row.what == "step with drafts"
    ]
    each = [(requests, rows, accepted) for requests in (1, 3) for rows in (2, 4) for accepted in ("0", "0.5", "1")]
    assert [(row.at["requests"], row.at["rows of each"], row.at["accepted"]) for row in found] == each
    assert all(figure.value > 0 for row in found for figure in row.figures)
    for row in found:
        most, tokens = int(row.at["rows of each"]), row.figure("tokens a step").value
        assert tokens == 1 if row.at["accepted"] == "0" else tokens == most if row.at["accepted"] == "1" else True
        ratios = [row.figure(name).value for name in ("step : without drafts", "TPOT : without drafts")]
        assert ratios[1] == pytest.approx(ratios[0] / tokens)


def test_a_fake_drafter_is_right_as_often_as_asked(tiny: Path) -> None:
    model = ModelConfig(dtype=Dtype.FP32, device=Device.CPU)
    subject = open_subject("tiny", tiny, model, 16, DRAFTING.beside(Steps((1,), (40,), (33,))), TorchKernels)
    drafter, steps = FakeDrafter(subject, 3, 4, DRAFTING, 0.5), 400
    # 1 + 1/2 + 1/4 + 1/8 tokens of each request.
    assert sum(drafter.accept() for _ in range(steps)) / steps / 3 == pytest.approx(1.875, rel=0.1)
    rows = drafter.step()
    assert len(rows) == 12 and all(len(row.token_ids) == 1 for row in rows)
    for first in range(0, 12, 4):
        one = rows[first : first + 4]
        assert [row.start - one[0].start for row in one] == [0, 1, 2, 3]
        assert one[0].start >= 39 and one[-1].context_len <= DRAFTING.longest
        assert {tuple(row.block_table) for row in one} == {tuple(one[0].block_table)}
    # A request's blocks are no other's.
    assert len({block for row in rows for block in row.block_table}) == sum(len(rows[n].block_table) for n in (0, 4, 8))


def test_a_cpu_is_told_that_the_models_are_too_large() -> None:
    with pytest.raises(BenchError, match="this study needs a GPU"):
        benchmark.run(BenchGpuShapesConfig(model=ModelConfig(device=Device.CPU)))
