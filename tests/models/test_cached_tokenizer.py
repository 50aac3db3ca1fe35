"""Tests that a tokenizer from the cache is the one that transformers makes, and that only a whole one is read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.api.requests.tokenizer import load_tokenizer
from pdserve.errors import ModelError
from pdserve.models.checkpoint import cached_tokenizer
from pdserve.models.checkpoint.cached_tokenizer import CachedTokenizer, read_tokenizer
from pdserve.models.checkpoint.model_files import packaged_gguf
from tests.machine.test_file_system import give_away

TEXTS = ["Hello", "  The  capital, isn't it? 12345\n\n\tété 漢字 🙂", "<|im_start|>user\nhi<|im_end|>", ""]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Yields the models whose tokenizers transformers makes."""
    models: list[Path] = []
    make = cached_tokenizer._made

    def note(model: Path) -> CachedTokenizer:
        models.append(model)
        return make(model)

    monkeypatch.setattr(cached_tokenizer, "_made", note)
    yield models


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_it_is_made_once_and_then_read(form: str, demo_model: Path, made: list[Path], tmp_path: Path) -> None:
    model = demo_model if form == "folder" else packaged_gguf()
    fresh = load_tokenizer(model)
    first, second = load_tokenizer(model, tmp_path), load_tokenizer(model, tmp_path)
    assert len(made) == 2, "once without a cache, and once for the cache"
    for text in TEXTS:
        for special in (False, True):
            ids = fresh.encode(text, add_special_tokens=special)
            assert first.encode(text, add_special_tokens=special) == ids
            assert second.encode(text, add_special_tokens=special) == ids
            assert second.decode(ids, skip_special_tokens=special) == fresh.decode(ids, skip_special_tokens=special)
    assert second.info(7) == fresh.info(7)
    assert second.chat_template == fresh.chat_template != ""


def test_each_file_of_the_folder_counts(demo_model: Path, made: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(demo_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    read_tokenizer(folder, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert read_tokenizer(folder, tmp_path).chat_template == "{{ messages }}"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<|endoftext|>"}))
    assert read_tokenizer(folder, tmp_path).special_tokens["pad_token"] == "<|endoftext|>"
    assert len(made) == 3


@pytest.mark.parametrize("keep", [0, 10, 1000, -1])
def test_a_torn_file_is_not_read(keep: int, demo_model: Path, made: list[Path], tmp_path: Path) -> None:
    wanted = read_tokenizer(demo_model, tmp_path)
    (path,) = (tmp_path / "tokenizers").glob("*.tokenizer")
    data = path.read_bytes()
    path.write_bytes(data[:keep] + bytes(len(data[keep:])))
    assert read_tokenizer(demo_model, tmp_path) == wanted
    assert path.read_bytes() == data
    assert len(made) == 2


def test_only_the_last_ones_stay(
    demo_model: Path, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_tokenizer, "_MOST", 2)
    folder = shutil.copytree(demo_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    for turn in range(3):
        (folder / "chat_template.jinja").write_text(str(turn))
        read_tokenizer(folder, tmp_path)
        for path in (tmp_path / "tokenizers").glob("*.tokenizer"):
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
    assert len(list((tmp_path / "tokenizers").glob("*.tokenizer"))) == 2
    assert list((tmp_path / "tokenizers").glob(".*draft")) == []
    read_tokenizer(folder, tmp_path)
    assert len(made) == 3


def test_a_cache_that_cannot_be_written(demo_model: Path, made: list[Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizers").touch()
    assert read_tokenizer(demo_model, tmp_path) == read_tokenizer(demo_model)
    assert len(made) == 2


def test_a_save_that_fails_costs_no_second_making(
    demo_model: Path, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "rename", fail)
    read_tokenizer(demo_model, tmp_path)
    assert len(made) == 1
    assert [each.suffix for each in (tmp_path / "tokenizers").iterdir()] == [".lock"]


def test_all_may_read_it_and_the_drafts_of_the_dead_go(demo_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizers"
    folder.mkdir()
    (folder / ".alive.draft").touch()
    (folder / ".dead.draft").touch()
    os.utime(folder / ".dead.draft", (0, 0))
    read_tokenizer(demo_model, tmp_path)
    (path,) = folder.glob("*.tokenizer")
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in folder.glob(".*.draft")] == [".alive.draft"]


def test_other_code_makes_another_one(
    demo_model: Path, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code.py"
    monkeypatch.setattr(cached_tokenizer, "_CODE", (code,))
    for text in ("one", "two", "two"):
        code.write_text(text)
        read_tokenizer(demo_model, tmp_path)
    assert len(made) == 2


def test_a_gguf_file_of_the_same_size_and_time_is_another_one(made: list[Path], tmp_path: Path) -> None:
    model = Path(shutil.copy2(packaged_gguf(), tmp_path / "model.gguf"))
    read_tokenizer(model, tmp_path)
    times = model.stat()
    with model.open("r+b") as file:
        file.seek(2**26)
        file.write(b"\xa5" * 64)
    os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
    read_tokenizer(model, tmp_path)
    assert len(made) == 2


@pytest.mark.parametrize("what", ["file", "folder"])
def test_one_that_another_user_may_have_written_is_not_read(
    what: str, demo_model: Path, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read_tokenizer(demo_model, tmp_path)
    (path,) = (tmp_path / "tokenizers").glob("*.tokenizer")
    if what == "file":
        path.chmod(0o666)
    else:
        give_away(path.parent, monkeypatch)
        give_away(path, monkeypatch)
    assert read_tokenizer(demo_model, tmp_path) == wanted
    assert len(made) == 2


def test_what_cannot_be_made_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError):
        read_tokenizer(tmp_path / "model", tmp_path)
    assert list((tmp_path / "tokenizers").glob("*.tokenizer")) == []


@pytest.mark.integration
def test_an_api_process_needs_neither_transformers_nor_torch(demo_model: Path, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, pdserve.api.node.server, pdserve.api.requests.tokenizer as t\n"
        "for model in sys.argv[2:]:\n"
        "    k = t.load_tokenizer(pathlib.Path(model), pathlib.Path(sys.argv[1]))\n"
        "    k.render_chat([{'role': 'user', 'content': 'x'}], add_generation_prompt=True,\n"
        "                  continue_final_message=False, created=0, template_kwargs={})\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'huggingface_hub'} & sys.modules.keys()))"
    )
    models = [demo_model, packaged_gguf()]
    for model in models:
        read_tokenizer(model, tmp_path)
    command = [sys.executable, "-c", program, *map(str, (tmp_path, *models))]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
