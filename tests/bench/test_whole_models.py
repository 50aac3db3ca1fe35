"""The models that ``make gpu`` times: small ones of each kind are read and measured on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.bench.engine.subject import Steps, open_subject
from pdserve.config import Device, ModelConfig
from pdserve.config.bench import BenchEngineConfig, EngineBenchConfig
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.gpu.verdict import TARGETS
from tests.gpu.whole_models import STEPS, WHOLE_MODELS, WholeModel

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 8,
    "n_routed_experts": 16,
    "num_local_experts": 8,
    "vocab_size": 300,
}


def small(model: WholeModel) -> WholeModel:
    shape = {name: SMALL.get(name, number) for name, number in model.shape.items()}
    if "kv_lora_rank" in shape:
        shape["num_key_value_heads"] = shape["num_attention_heads"]
    return replace(model, shape=shape)


@pytest.mark.parametrize("model", WHOLE_MODELS, ids=lambda model: model.name)
def test_a_whole_model_is_one_that_the_engine_reads_and_runs(model: WholeModel, tmp_path: Path) -> None:
    small(model).write(tmp_path)
    subject = open_subject(
        "small", tmp_path, ModelConfig(device=Device.CPU), 16, Steps((2,), (17,), (20,)), TorchKernels
    )
    logits = subject.runner.run(subject.decode_rows(2, 17))
    assert subject.config.max_positions >= STEPS.longest
    assert logits.shape == (2, 300)
    assert logits.isfinite().all()
    assert float(logits.float().std()) > 0


@pytest.mark.parametrize("model", WHOLE_MODELS, ids=lambda model: model.name)
def test_its_measurements_have_what_the_targets_ask_for(model: WholeModel) -> None:
    config = BenchEngineConfig(engine=EngineBenchConfig(seconds=0.01, copy_mib=1), model=ModelConfig(device=Device.CPU))
    steps = replace(STEPS, contexts=(32,), chunks=(32,))
    rows = small(model).rows(config, steps, TorchKernels)
    targets = [target for target in TARGETS if target.at.get("model") == model.name]
    assert len(targets) == len(STEPS.batches) + len(STEPS.chunks)
    for target in targets:
        at = {name: 32 if name == "chunk" else value for name, value in target.at.items()}
        (row,) = (row for row in rows if row.what == target.what and at.items() <= row.at.items())
        assert target.measured(row) > 0
