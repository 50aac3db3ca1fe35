"""Tests that GGUF files load directly, with the logits of the folder that they were made from, or are refused."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pdserve.errors import ModelError
from pdserve.models.backend import CPU
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.fingerprint import fingerprint
from pdserve.models.checkpoint.gguf.file import read_gguf
from pdserve.models.checkpoint.gguf.tensors import GgufTensors
from pdserve.models.checkpoint.model_files import resolve_model, served_model_name
from pdserve.models.checkpoint.weights import ALL, Checkpoint
from pdserve.models.parts.rotary import rotary_table
from pdserve.models.recipe import LinearScaling
from pdserve.models.runner import StepRow
from tests.examples import examples
from tests.models.greedy import small_runner
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import reference_logits, save_tiny_model

PROMPT = list(range(100, 137))


def logits(path: Path) -> torch.Tensor:
    runner = small_runner(path)
    return torch.cat([runner.run([StepRow([token], i, range(16), True)]) for i, token in enumerate(PROMPT)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3-pattern"])
def test_logits_are_those_of_the_folder(tmp_path: Path, family: str) -> None:
    folder = save_tiny_model(family, tmp_path / "folder")
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(path), reference_logits(folder, PROMPT), rtol=1e-4, atol=1e-3)


def test_the_shape_is_read(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf", {"tokenizer.ggml.eot_token_id": 7})
    config = read_family_config(path)
    assert (config.heads, config.kv_heads, config.head_dim, config.num_layers) == (6, 2, 10, 3)
    assert (config.max_positions, config.vocab_size, config.recipe.tied) == (512, 512, True)
    assert config.eos_token_ids == {2, 7}


def test_settings_that_change_nothing_are_read(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    plain = read_family_config(save_tiny_gguf(folder, tmp_path / "plain.gguf"))
    for window in (0, 512):
        extra = {"llama.attention.sliding_window": window, "llama.rope.scaling.factor": 1.0}
        assert read_family_config(save_tiny_gguf(folder, tmp_path / f"{window}.gguf", extra)) == plain


def test_a_rotary_factor_alone_scales_linearly(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf", {"llama.rope.scaling.factor": 4.0})
    rotary = read_family_config(path).recipe.attention[0].rotary
    assert rotary is not None
    assert rotary.scaling == LinearScaling(4.0)


def test_formats_and_tensors_are_checked_before_any_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(GgufTensors, "read", read)
    folder = save_tiny_model("llama", tmp_path / "folder")
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    for found, written, match in (
        (b"blk.2.ffn_up.weight", b"blk.2.ffn_up.strange", r"ffn_up.*strange|up_proj"),
        (b"blk.1.attn_norm.weight", b"blk.7.attn_norm.weight", r"layers\.[17]\.input_layernorm"),
    ):
        path.write_bytes(whole.replace(found, written[: len(found)]))
        with pytest.raises(ModelError, match=match):
            small_runner(path)


def test_llama_3_divides_its_rotary_frequencies(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    plain = read_family_config(folder)
    divided = read_family_config(save_tiny_gguf(folder, tmp_path / "tiny.gguf", rope_freqs=[1, 1, 2, 4, 8]))
    cos, _ = rotary_table(divided.recipe.attention[0].rotary, divided.head_dim, 64, torch.float32, CPU)
    wanted, _ = rotary_table(plain.recipe.attention[0].rotary, plain.head_dim, 64, torch.float32, CPU)
    for column, divisor in enumerate([1, 1, 2, 4, 8]):
        torch.testing.assert_close(cos[::divisor, column][:8], wanted[:, column][:8])


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.BF16])
def test_parts_of_a_quantised_tensor(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    tensors = GgufTensors(save_tiny_gguf(folder, tmp_path / "tiny.gguf", quantized=kind))
    name = "model.layers.1.mlp.down_proj.weight"
    plain = load_file(folder / "model.safetensors")[name].numpy()
    wanted = torch.from_numpy(dequantize(quantize(plain, kind), kind))
    torch.testing.assert_close(tensors.read(name, ALL, ALL, torch.float32), wanted, rtol=0, atol=0)
    part = tensors.read(name, slice(20, 40), slice(48, 96), torch.bfloat16)
    assert torch.equal(part, wanted[20:40, 48:].bfloat16())


def test_a_rank_reads_its_heads_only(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    gguf = Checkpoint(save_tiny_gguf(folder, tmp_path / "tiny.gguf"), torch.float32)
    name, mine = "model.layers.0.self_attn.q_proj.weight", slice(20, 40)
    shape = GgufTensors(gguf.path).shape(name)
    assert torch.equal(
        gguf.take(name, shape, rows=mine), Checkpoint(folder, torch.float32).take(name, shape, rows=mine)
    )


def test_fingerprint_covers_the_file(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    one = save_tiny_gguf(folder, tmp_path / "one.gguf")
    same = save_tiny_gguf(folder, tmp_path / "same.gguf")
    other = save_tiny_gguf(folder, tmp_path / "other.gguf", {"llama.rope.freq_base": 5.0} | {"general.name": "other"})
    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(one) != fingerprint(other)


def test_it_is_served_under_its_name(tmp_path: Path) -> None:
    path = save_tiny_gguf(save_tiny_model("llama", tmp_path / "folder"), tmp_path / "tiny-q8.gguf")
    assert resolve_model(str(path)) == path
    assert served_model_name(str(path), path) == "tiny-q8"


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_used_count"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count"),
        ({"llama.attention.sliding_window": 64}, r"llama\.attention\.sliding_window"),
        ({"llama.final_logit_softcapping": 30.0}, r"llama\.final_logit_softcapping"),
        ({"llama.rope.freq_base_swa": 5.0}, r"llama\.rope\.freq_base_swa"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, r"rope\.scaling\.factor.* 4\.0"),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"rope\.scaling\.attn_factor 2\.0"),
        ({"split.count": 2}, "one part of several"),
    ],
)
def test_settings_that_would_be_wrong_are_refused(tmp_path: Path, extra: dict[str, int | str], match: str) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    with pytest.raises(ModelError, match=match):
        read_family_config(save_tiny_gguf(folder, tmp_path / "tiny.gguf", extra))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    with pytest.raises(ModelError, match=r"'rwkv7'.*gemma3.*llama"):
        read_family_config(save_tiny_gguf(folder, tmp_path / "tiny.gguf", architecture="rwkv7"))


def test_an_unknown_number_format_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf", quantized=GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    name = b"blk.1.ffn_down.weight"
    kind = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[kind] == GGMLQuantizationType.Q8_0
    for number, match in ((GGMLQuantizationType.Q8_1, "Q8_1, which is not supported"), (250, "unknown number format")):
        path.write_bytes(whole[:kind] + bytes([number]) + whole[kind + 1 :])
        with pytest.raises(ModelError, match=match):
            GgufTensors(path).read("model.layers.1.mlp.down_proj.weight", slice(0, 1), ALL, torch.float32)


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 2000, -100])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    folder = save_tiny_model("llama", tmp_path / "folder")
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        small_runner(path)


def test_lengths_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "lies.gguf"
    endless_array = b"\x01" + bytes(7) + b"k" + b"\x09\0\0\0" + b"\x06\0\0\0" + b"\xff" * 8
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + endless_array)
    with pytest.raises(ModelError, match="not a readable GGUF"):
        read_gguf(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return save_tiny_gguf(save_tiny_model("llama", folder), folder / "tiny.gguf")


@settings(max_examples=examples(100))
@given(at=st.integers(0, 3000), damage=st.binary(min_size=1, max_size=9))
def test_a_damaged_header_is_refused_or_harmless(whole: Path, at: int, damage: bytes) -> None:
    path, data = whole.with_name("damaged.gguf"), whole.read_bytes()
    path.write_bytes(data[:at] + damage + data[at + 1 :])
    with suppress(ModelError):
        read_family_config(path)
        tensors = GgufTensors(path)
        for name in tensors.names():
            tensors.read(name, slice(0, 1), ALL, torch.float32)
