from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config import Dtype
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config, read_family_config
from pdserve.models.checkpoint.model_files import weight_files
from pdserve.models.checkpoint.safetensors.files import SafetensorsFiles
from pdserve.models.checkpoint.weights import Checkpoint
from pdserve.models.decoder import build_decoder
from pdserve.models.parts.projections import Building
from pdserve.models.runner import StepRow
from pdserve.models.table import COMPOSITES, FAMILIES
from pdserve.models.tp.shares import ALONE
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.grouped_runner import GroupedRunner
from tests.models.tiny_families import save_tiny
from tests.models.unsummed import Unsummed
from tests.nightly import nightly
from tests.tiny_models import reference_logits, save_tiny_model


def load(folder: Path) -> GroupedRunner:
    return GroupedRunner(folder, read_decoder_config(folder), Dtype.FP32, 4, 8, 32, TorchKernels())


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    rewrite(folder, tensors)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    rewrite(folder, load_file(folder / "model.safetensors") | {"model.extra.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"model\.extra\.weight"):
        load(folder)


@pytest.fixture
def no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(SafetensorsFiles, "read", read)


QWEN3_NORM = "model.layers.1.self_attn.q_norm.weight"
QWEN2_BIAS = "model.layers.2.self_attn.k_proj.bias"
LLAMA_BIAS = "model.layers.0.self_attn.v_proj.bias"
SCALE = "model.layers.0.mlp.up_proj.weight_scale"
EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("family", "missing", "unknown"),
    [
        ("qwen3", QWEN3_NORM, None),
        ("qwen2", QWEN2_BIAS, None),
        ("qwen3-moe", EXPERT, None),
        # transformers would leave it unread, because the configuration says that there is none.
        ("llama", None, LLAMA_BIAS),
        ("gemma3", None, SCALE),
    ],
)
def test_tensors_are_compared_before_any_is_read(
    tmp_path: Path, no_weights_are_read: None, family: str, missing: str | None, unknown: str | None
) -> None:
    folder = save_tiny_model(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    if missing is not None:
        del tensors[missing]
    if unknown is not None:
        tensors[unknown] = torch.ones(20)
    rewrite(folder, tensors)
    with pytest.raises(ModelError, match=re.escape(missing or unknown or "")):
        load(folder)


def test_weights_that_are_quantised_are_refused(tmp_path: Path, no_weights_are_read: None) -> None:
    folder = save_tiny_model("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, tensors | {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)})
    with pytest.raises(ModelError, match=rf"quantised.*{re.escape(name)}' is in F8_E4M3, with the scale .*_scale'"):
        load(folder)
    rewrite(folder, tensors | {name: tensors[name].to(torch.int8)})
    with pytest.raises(ModelError, match=rf"quantised.*{re.escape(name)}' is in I8\."):
        load(folder)


@pytest.mark.parametrize("family", ["llama", "gemma3-images"])
def test_a_quantised_configuration_is_refused_by_its_method(tmp_path: Path, family: str) -> None:
    folder = save_tiny_model(family, tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    said = {"quantization_config": {"quant_method": "aqlm"}}
    inner = config | {"text_config": config["text_config"] | said} if "text_config" in config else config | said
    for changed in (config | said, inner):
        path.write_text(json.dumps(changed))
        with pytest.raises(ModelError, match=r"are quantised \(config\.json: aqlm\)"):
            read_decoder_config(folder)


@pytest.mark.parametrize("method", ["bitsandbytes", "aqlm", "hqq", "mxfp4"])
def test_methods_that_a_family_does_not_read_are_refused(tmp_path: Path, method: str) -> None:
    reads = {family for family, settings in FAMILIES.items() if method in settings.quantisations}
    for family in sorted((FAMILIES.keys() | COMPOSITES.keys()) - reads):
        said = {"model_type": family, "quantization_config": {"quant_method": method}}
        for values in (said, {"model_type": family, "text_config": said}):
            (tmp_path / "config.json").write_text(json.dumps(values))
            with pytest.raises(ModelError, match=rf"are quantised \(config\.json: {method}\)"):
                read_decoder_config(tmp_path)


WRONG: dict[str, list[dict[str, int]]] = {
    "llama": [
        {"num_attention_heads": 4},
        {"num_attention_heads": 12},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 6},
        {"head_dim": 8},
    ],
    "gemma3": [{"head_dim": 12}],
    "qwen3-moe": [{"moe_intermediate_size": 20}, {"num_local_experts": 7}, {"num_local_experts": 9}],
}
WRONG_IN_ALL = [{"vocab_size": 100}, {"vocab_size": 10_000}, {"hidden_size": 58}, {"intermediate_size": 94}]


@pytest.mark.parametrize("family", WRONG)
def test_a_tensor_that_does_not_fit_the_configuration_is_named(tmp_path: Path, family: str) -> None:
    folder = save_tiny_model(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for wrong in (*WRONG[family], *(WRONG_IN_ALL if family != "qwen3-moe" else ())):
        (folder / "config.json").write_text(json.dumps(config | wrong))
        for tp in (ALONE, Unsummed(0, 2), Unsummed(1, 2)):
            building = Building(Checkpoint(folder, torch.float32), TorchKernels(), tp)
            with pytest.raises(ModelError, match=r"^tensor 'model\..*' of .* has the shape \[.*\]; .* to be \[.*\]$"):
                build_decoder(read_decoder_config(folder), building, 64, torch.float32)


def test_rotary_tables_of_older_exports_are_not_needed(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(5) for i in range(3)}
    rewrite(folder, load_file(folder / "model.safetensors") | tables)
    load(folder)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_head_of_its_own_counts_although_the_configuration_ties_it(tmp_path: Path, family: str) -> None:
    """The reference is transformers, which does not tie what differs either."""
    folder = save_tiny_model(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    prompt = [5, 9, 11]
    last = []
    for head in (embedding, embedding.flip(0)):
        rewrite(folder, tensors | {"lm_head.weight": head.clone()})
        assert read_family_config(folder).recipe.tied
        got = load(folder).run([StepRow(prompt, 0, range(8), True)])[0]
        torch.testing.assert_close(got, reference_logits(folder, prompt)[-1], rtol=1e-3, atol=1e-3)
        last.append(got)
    assert not torch.allclose(last[0], last[1])


def test_sharded_checkpoint(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(folder)


def test_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../secret"}}))
    with pytest.raises(ModelError, match="outside its folder"):
        weight_files(tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        Checkpoint(folder, torch.float32)


@pytest.mark.parametrize(
    ("case", "precise"),
    [
        ("nemotron-h", {"A_log", "dt_bias", "D", "e_score_correction_bias", "gate.weight"}),
        ("qwen3-5", {"A_log", "dt_bias"}),
        ("kimi-linear", {"A_log", "dt_bias", "e_score_correction_bias", "gate.weight"}),
        ("gpt-oss", {"sinks"}),
        (
            "deepseek-v4",
            {"ape", "attn_sink", "gate.bias", "gate.weight", "weights_proj.weight", "_fn", "_base", "_scale"},
        ),
        nightly(
            "qwen4-exp",
            {"A_log", "dt_bias", "hc_norm.weight"} | {f"norm_{of}.weight" for of in ("key", "query", "conv")},
        ),
    ],
)
def test_numbers_that_decide_much_are_not_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, precise: set[str]
) -> None:
    folder = save_tiny(case, tmp_path)
    taken: set[str] = set()
    usual = Checkpoint.take

    def take(checkpoint: Checkpoint, name: str, *part: Any, **named: Any) -> torch.Tensor:
        found = usual(checkpoint, name, *part, **named)
        if found.dtype == torch.float32:
            taken.add(name)
        return found

    monkeypatch.setattr(Checkpoint, "take", take)
    checkpoint = Checkpoint(folder, torch.bfloat16)
    build_decoder(read_decoder_config(folder), Building(checkpoint, TorchKernels(), ALONE), 64, torch.bfloat16)
    assert {next((end for end in precise if name.endswith(end)), name) for name in taken} == precise


def test_a_tensor_may_be_taken_more_precisely(tmp_path: Path) -> None:
    rewrite(tmp_path, {"rate": torch.tensor([1.001, 2.5])})
    precise = Checkpoint(tmp_path, torch.bfloat16).take("rate", (2,), dtype=torch.float32)
    assert precise.tolist() == torch.tensor([1.001, 2.5]).tolist()
    assert Checkpoint(tmp_path, torch.bfloat16).take("rate", (2,)).tolist() == [1.0, 2.5]


def test_a_text_part_saved_alone_may_keep_its_names(tmp_path: Path) -> None:
    folder = save_tiny("qwen3-5", tmp_path)
    before = load(folder)
    names = {name: name.replace("model.", "model.language_model.", 1) for name in load_file(weight_files(folder)[0])}
    rewrite(folder, {names[name]: tensor for name, tensor in load_file(weight_files(folder)[0]).items()})
    row = StepRow([3, 5, 7], 0, [1], True)
    torch.testing.assert_close(load(folder).run([row]), before.run([row]))
