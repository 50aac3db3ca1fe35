"""What a configuration says of quantised weights: each form is read, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ModelError
from pdserve.models.checkpoint.safetensors.quantisation import FORMS, METHODS, Form, Scheme, read_quantisation
from pdserve_kernels.contract import BlockFormat
from pdserve_kernels.triton.block_packing import PACKED_FORMS
from tests.models.quantisers import FORMATS


def folder(path: Path, config: dict[str, Any], beside: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if beside is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(beside))
    return path


def said(method: str, **settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **settings}}


def compressed(form: str = "pack-quantized", weights: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32} | (weights or {})}
    return said("compressed-tensors", format=form, config_groups={"group_0": group}, **settings)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (said("bitsandbytes", load_in_4bit=True), r"\(config\.json: bitsandbytes\), and such weights are not read here"),
    (said("mxfp4"), r"config\.json: mxfp4"),
    (said("fp8", fmt="e5m2"), r"fp8\), and numbers in e5m2"),
    (said("fp8", weight_block_size=[128, 0]), r"blocks of \[128, 0\]"),
    (said("awq", bits=8), "8 bits are not read, 4 are"),
    (said("awq", bits=4, version="gemv"), "gemv of autoawq, is not read"),
    (said("awq", bits=4, backend="llm-awq"), "gemm of llm-awq, is not read"),
    (said("gptq", bits=3, group_size=128), "3 bits are not read, 4 and 8 are"),
    (said("gptq", bits=4, checkpoint_format="marlin"), "marlin, is not read"),
    (said("gptq", bits=4, dynamic={"-:lm_head": {}, "+:.*up.*": {"bits": 8}}), r"dynamic: \+:\.\*up"),
    (said("gptq", bits=4, group_size=0), "groups of 0 inputs"),
    (said("gptq"), "bits"),
    (compressed("marlin-24"), r"compressed-tensors, marlin-24\), and the format marlin-24 is not read"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), r"sparse weights \(sparse-24-bitmask\)"),
    (compressed(transform_config={"config_groups": {"u": {}}}), "transforms"),
    (compressed(weights={"num_bits": 3}), "int of 3 bits is not read"),
    (said("compressed-tensors", format="int-quantized"), "config_groups"),
    (said("modelopt", quant_algo="MIXED_PRECISION"), "modelopt, MIXED_PRECISION.* and not MIXED_PRECISION"),
    ({"quantization": {"bits": 6, "group_size": 64}}, r"mlx\), and 6 bits are not read"),
    ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "the mode mxfp4 is not read"),
    ({"quantization_config": {"bits": 4}}, "without a quant_method"),
    ({"compression_config": {"quant_method": "sparseml"}}, "sparseml"),
    ({"text_config": said("aqlm")}, "aqlm"),
]


@pytest.mark.parametrize(("config", "match"), REFUSED)
def test_a_form_that_is_not_read_is_refused_by_its_name(tmp_path: Path, config: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match) as refused:
        read_quantisation(folder(tmp_path, config))
    assert "a folder with bf16 weights or a GGUF file would be read" in str(refused.value)


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
def test_a_form_that_is_read_is_one_of_the_table(tmp_path: Path, form: Any) -> None:
    found = read_quantisation(folder(tmp_path, dict(form.config)))
    assert found is not None
    assert found.method in METHODS


def test_modules_that_gptq_leaves_out_are_known_by_the_files(tmp_path: Path) -> None:
    found = read_quantisation(folder(tmp_path, said("gptq", bits=4, group_size=64, dynamic={"-:.*visual.*": {}})))
    assert found is not None
    assert found.schemes == (Scheme("int", 4, 64),)


def test_a_folder_that_is_not_quantised(tmp_path: Path) -> None:
    assert read_quantisation(folder(tmp_path, {"quantization_config": None})) is None
    assert read_quantisation(folder(tmp_path, {}, {"quantization": {"quant_algo": None}})) is None


def test_a_file_beside_the_configuration_says_it(tmp_path: Path) -> None:
    settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    found = read_quantisation(folder(tmp_path, {}, {"producer": {"name": "modelopt"}, "quantization": settings}))
    assert found is not None
    assert (found.method, found.file, found.schemes) == ("modelopt", "hf_quant_config.json", (Scheme("float", 4),))
    assert found.ignores("lm_head")
    assert not found.ignores("model.layers.0.mlp.up_proj")
    settings["quant_algo"] = "W4A8_AWQ"
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: modelopt, W4A8_AWQ"):
        read_quantisation(folder(tmp_path, {}, {"quantization": settings}))


def test_modules_of_mlx_may_have_settings_of_their_own(tmp_path: Path) -> None:
    own = {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32}, "model.embed_tokens": False}
    found = read_quantisation(folder(tmp_path, {"quantization": own, "quantization_config": own}))
    assert found is not None
    assert found.scheme_of("lm_head") == Scheme("int", 8, 32)
    assert found.scheme_of("model.layers.0.mlp.up_proj") == Scheme("int", 4, 64)
    assert found.ignores("model.embed_tokens")


def test_patterns_of_modules(tmp_path: Path) -> None:
    patterns = ["lm_head", "re:.*self_attn.*", "model.layers.1.mlp.*"]
    found = read_quantisation(folder(tmp_path, compressed(ignore=patterns)))
    assert found is not None
    ignored = {
        name for name in ("lm_head", "a.lm_head", "x.self_attn.q", "model.layers.1.mlp.up") if found.ignores(name)
    }
    assert ignored == {"lm_head", "x.self_attn.q", "model.layers.1.mlp.up"}


def test_the_table_has_each_form_and_blocks_that_there_are() -> None:
    assert FORMS.keys() == set(Form)
    for form in FORMS.values():
        if form.cpu.blocks:
            blocks = BlockFormat[form.cpu.blocks]
            assert form.cpu.bits == 8 * blocks.block_bytes / blocks.elements
        # One fp32 factor of a row is in no number's part.
        packed = PACKED_FORMS[BlockFormat[form.gpu.blocks]].nbytes(1, 2**20)
        assert form.gpu.bits == pytest.approx(8 * packed / 2**20, rel=1e-4)
