"""Tests decoders that transformers computes with our attention: they give the tokens of ``generate`` or are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    BitNetConfig,
    BloomConfig,
    GPT2Config,
    MellumConfig,
    OlmoConfig,
    OPTConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    RwkvConfig,
)

from pdserve.config import Dtype
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.decoder_config import FallbackConfig
from pdserve.models.checkpoint.weights import Checkpoint
from pdserve.models.decoder import build_decoder
from pdserve.models.fallback.hf_check import InFp32, Product, watch_products
from pdserve.models.fallback.hf_decoder import load_hf_model, with_other_settings
from pdserve.models.parts.projections import Building
from pdserve.models.runner import StepRow
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.greedy import greedy_tokens, small_runner
from tests.models.unsummed import Unsummed
from tests.tiny_models import WINDOW, reference_last_logits

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
}
GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
}
OPT_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, PretrainedConfig] = {
    # GPT-2 has absolute positions, and scales scores differently in each layer.
    "gpt2": GPT2Config(**GPT2_SHAPE, scale_attn_by_inverse_layer_idx=True),
    "bitnet": BitNetConfig(**SHAPE),
    "mellum": MellumConfig(**SHAPE, **KINDS, head_dim=12, sliding_window=WINDOW),
    "olmo": OlmoConfig(**SHAPE, clip_qkv=1.5),
    "phimoe": PhimoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}
PROMPTS = [[5, 9, 77], list(range(100, 160))]


def save(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(3)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def generated(folder: Path, prompt: list[int], count: int) -> list[int]:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_are_those_of_generate(tmp_path: Path, family: str) -> None:
    folder = save(FAMILIES[family], tmp_path)
    runner = small_runner(folder)
    for prompt in PROMPTS:
        assert greedy_tokens(runner, prompt, 16, chunk=17) == generated(folder, prompt, 16)


def test_requests_in_one_step_do_not_see_each_other(tmp_path: Path) -> None:
    folder = save(FAMILIES["bitnet"], tmp_path)
    runner = small_runner(folder)
    short, long = PROMPTS
    tables = [range(16), range(16, 32)]
    runner.run([StepRow(short[:-1], 0, tables[0], False)])
    logits = runner.run([StepRow(short[-1:], 2, tables[0], True), StepRow(long, 0, tables[1], True)])
    wanted = torch.stack(reference_last_logits(folder, PROMPTS))
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-3)
    assert runner.run([StepRow([7], 3, tables[0], False)]).shape == (0, 512)


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    folder = save(FAMILIES["bitnet"], tmp_path)
    (wanted,) = reference_last_logits(folder, PROMPTS[1:])
    (got,) = small_runner(folder, Dtype.BF16).run([StepRow(PROMPTS[1], 0, range(16), True)])
    assert got.dtype is torch.float32
    assert torch.cosine_similarity(got, wanted, dim=0) > 0.99


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (BloomConfig(vocab_size=512, hidden_size=48, n_layer=2, n_head=4), "max_position_embeddings"),
        (RwkvConfig(vocab_size=512, hidden_size=48, num_hidden_layers=2), "states are not served yet"),
        (
            OPTConfig(**OPT_SHAPE, do_layer_norm_before=False),
            r"opt model cannot be served: its code does not compute its head",
        ),
        (BitNetConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (BioGptConfig(**SHAPE), "4 key heads of 12.*says 2 of 12"),
    ],
    ids=["alibi", "states", "opt", "dynamic-rotary", "heads"],
)
def test_what_paged_attention_cannot_compute_is_refused(tmp_path: Path, config: PretrainedConfig, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        small_runner(save(config, tmp_path))


def test_other_logits_than_those_of_transformers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(FAMILIES["mellum"], tmp_path)
    plan = TorchKernels.plan_attention

    def plan_with_another_scale(
        self: TorchKernels, layout: Any, cache: Any, rows: Any, heads: int, scale: float, cap: float | None = None
    ) -> Any:
        return plan(self, layout, cache, rows, heads, scale * 1.05)

    monkeypatch.setattr(TorchKernels, "plan_attention", plan_with_another_scale)
    with pytest.raises(ModelError, match=r"mellum.*logits differ from those of transformers by \d"):
        small_runner(folder)


def test_a_missing_tensor_is_not_made_up(tmp_path: Path) -> None:
    folder = save(FAMILIES["mellum"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        small_runner(folder)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    folder = save(FAMILIES["mellum"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        small_runner(folder)


def test_it_has_one_rank(tmp_path: Path) -> None:
    folder = save(FAMILIES["mellum"], tmp_path)
    building = Building(Checkpoint(folder, torch.float32), TorchKernels(), Unsummed(0, 2))
    with pytest.raises(ModelError, match=r"--tensor-parallel-size 2 is for .*llama.*mellum model has one rank"):
        build_decoder(read_decoder_config(folder), building, 64, torch.float32)


def rewritten(folder: Path, changes: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changes(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    """Does what exporters of FP8 do: each matrix of the layers is divided by a scale, which is stored beside it."""
    for name, tensor in list(tensors.items()):
        if "layers" in name and tensor.dim() == 2:
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "weight_scale"] = scale.reshape(1)


@pytest.fixture
def no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("pdserve.models.fallback.hf_check.load_hf_model", read)


SAID: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    ({}, None, r"are quantised.*tensor '.*weight' is in F8_E4M3, with the scale '.*weight_scale'"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, None, r"config\.json: modelopt, FP8"),
    ({}, {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, r"hf_quant.*: modelopt, NVFP4"),
    ({"compression_config": {"quant_method": "unheard-of"}}, None, r"config\.json: unheard-of"),
    ({"quantization_config": {"bits": 4}}, None, "without a quant_method"),
]


@pytest.mark.parametrize("family", ["phimoe", "mellum"])
@pytest.mark.parametrize(("config", "beside", "match"), SAID)
def test_quantised_weights_are_refused_before_they_are_read(
    tmp_path: Path,
    no_weights_are_read: None,
    family: str,
    config: dict[str, Any],
    beside: dict[str, Any] | None,
    match: str,
) -> None:
    folder = rewritten(save(FAMILIES[family], tmp_path), quantise)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(ModelError, match=match):
        small_runner(folder)


@pytest.mark.parametrize("family", ["phimoe", "mellum"])
def test_unknown_and_missing_tensors_are_named_before_any_is_read(
    tmp_path: Path, no_weights_are_read: None, family: str
) -> None:
    folder = save(FAMILIES[family], tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    rewritten(folder, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(ModelError, match=rf"one tensor that this architecture lacks .*: {re.escape(name)}"):
        small_runner(folder)
    save(FAMILIES[family], folder)
    rewritten(folder, lambda tensors: tensors.__delitem__("model.norm.weight"))
    with pytest.raises(ModelError, match=r"lacks tensors.*model\.norm\.weight"):
        small_runner(folder)


def test_settings_that_a_models_code_trips_over_are_a_refusal(tmp_path: Path) -> None:
    folder = save(FAMILIES["mellum"], tmp_path)
    (folder / "config.json").write_text(json.dumps(FAMILIES["phimoe"].to_dict() | {"hidden_act": "unheard-of"}))
    with pytest.raises(ModelError, match=r"transformers cannot load .*: KeyError: "):
        small_runner(folder)


def test_tensors_that_transformers_may_leave_unread_are_no_error(tmp_path: Path) -> None:
    gpt = save(FAMILIES["gpt2"], tmp_path)
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool) for i in range(2)}
    small_runner(rewritten(gpt, lambda tensors: tensors.update(masks)))


def test_the_score_of_masked_tokens_that_older_exports_have_is_no_weight(tmp_path: Path) -> None:
    gpt = save(FAMILIES["gpt2"], tmp_path)
    names = [f"transformer.h.{i}.attn.masked_bias" for i in range(2)]
    small_runner(rewritten(gpt, lambda tensors: tensors.update({name: torch.tensor(-1e4) for name in names})))


class Ordinary(torch.nn.Module):
    """Calls two linear layers, multiplies with the weight of a third, and leaves a fourth alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gate, self.unused = (torch.nn.Linear(8, 8, bias=i > 0) for i in range(4))
        self.same = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.linear(x, self.gate.weight)
        called: torch.Tensor = self.same(self.second(self.first(x)))
        return called + gate


@torch.inference_mode()
def test_only_layers_that_are_called_and_nothing_else_are_packed() -> None:
    model, x = Ordinary(), torch.randn(2, 3, 8)
    wanted = model(x)
    products = watch_products(model)
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=0)
    for product in products:
        product.pack(TorchKernels())
    assert model.first is model.same
    left = {name for name, _ in model.named_parameters()}
    assert left == {"gate.weight", "gate.bias", "unused.weight", "unused.bias"}
    torch.testing.assert_close(model(x), wanted)


@torch.inference_mode()
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_in_bf16_is_checked_in_fp32(tmp_path: Path, family: str) -> None:
    save(FAMILIES[family], tmp_path)
    rewritten(tmp_path, lambda tensors: tensors.update({name: each.bfloat16() for name, each in tensors.items()}))
    hf = FAMILIES[family]
    half, whole = (load_hf_model(tmp_path, hf, dtype) for dtype in (torch.bfloat16, torch.float32))
    widened = with_other_settings(half, hf)
    assert all(one is other for one, other in zip(half.parameters(), widened.parameters(), strict=True))
    ids = torch.tensor([PROMPTS[1]])
    with InFp32(widened):
        found = widened(ids, use_cache=False).logits
    torch.testing.assert_close(found, whole(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_a_model_is_loaded_once_and_in_the_numbers_in_which_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(FAMILIES["phimoe"], tmp_path)
    loaded: list[tuple[torch.dtype, PreTrainedModel]] = []

    def load(folder: Path, hf: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        loaded.append((dtype, load_hf_model(folder, hf, dtype, device)))
        return loaded[-1][1]

    monkeypatch.setattr("pdserve.models.fallback.hf_check.load_hf_model", load)
    small_runner(folder, Dtype.BF16)
    ((dtype, model),) = loaded
    assert dtype is torch.bfloat16
    packed = {name for name, module in model.named_modules() if isinstance(module, Product) and not module._parameters}
    attention = {f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkvo"}
    assert packed >= attention | {"lm_head"}


def test_memory_for_steps_counts_the_feed_forward_parts_of_every_chosen_expert(tmp_path: Path) -> None:
    config = read_decoder_config(save(FAMILIES["phimoe"], tmp_path))
    assert isinstance(config, FallbackConfig)
    assert config.channels == 2 * 4 * SHAPE["hidden_size"]
