from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import MambaConfig

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import read_decoder_config
from tests.tiny_models import FAMILIES, WINDOW, save_tiny_model


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_shape_is_read(tmp_path: Path, family: str) -> None:
    config = read_decoder_config(save_tiny_model(family, tmp_path))
    assert (config.heads, config.kv_heads, config.head_dim, config.num_layers) == (6, 2, 10, 3)
    assert config.max_positions == 512
    assert config.eos_token_ids == {2}


def test_several_end_of_sequence_ids(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_decoder_config(folder).eos_token_ids == {2, 7}


def windows(folder: Path) -> tuple[int | None, ...]:
    return read_decoder_config(folder).windows


def test_windows_are_those_of_transformers(tmp_path: Path) -> None:
    assert windows(save_tiny_model("mistral-window", tmp_path / "mistral")) == (WINDOW, WINDOW, WINDOW)
    assert windows(save_tiny_model("qwen2-window", tmp_path / "qwen2")) == (None, WINDOW, WINDOW)
    assert windows(save_tiny_model("qwen3-window", tmp_path / "qwen3")) == (WINDOW, None, WINDOW)
    assert windows(save_tiny_model("gemma3", tmp_path / "gemma3")) == (WINDOW, WINDOW, None)
    assert windows(save_tiny_model("llama", tmp_path / "llama")) == (None, None, None)


def test_unused_sliding_window_is_none(tmp_path: Path) -> None:
    folder = edited(save_tiny_model("qwen2", tmp_path), sliding_window=128, use_sliding_window=False)
    assert windows(folder) == (None, None, None)


def test_layers_of_another_kind_are_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(ModelError, match="layer_types"):
        windows(edited(save_tiny_model("qwen3", tmp_path), layer_types=kinds))


def test_unsupported_family_names_the_supported_ones(tmp_path: Path) -> None:
    folder = edited(save_tiny_model("llama", tmp_path), model_type="t5")
    with pytest.raises(ModelError, match=r"'t5'.*llama.*qwen3.*attention interface"):
        read_decoder_config(folder)


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    MambaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"mamba.*num_attention_heads"):
        read_decoder_config(tmp_path)


def test_unsupported_activation(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gelu"):
        read_decoder_config(edited(save_tiny_model("llama", tmp_path), hidden_act="gelu"))


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a readable"):
        read_decoder_config(tmp_path)
