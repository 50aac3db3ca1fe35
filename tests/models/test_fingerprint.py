"""Tests that only the same model has the same fingerprint, and that no byte of it is read more often than needed."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from safetensors.torch import load_file, save_file

from pdserve.errors import ModelError
from pdserve.models.checkpoint import cached_files
from pdserve.models.checkpoint import fingerprint as digests
from pdserve.models.checkpoint.fingerprint import PIECE, REMEMBERED, content_digest, fingerprint, weights_fingerprint
from tests.eventually import eventually
from tests.machine.test_file_system import give_away
from tests.tiny_models import save_tiny_model

OLD_NS = 10**18


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Returns the large files that are read, and begins as a new process does."""
    monkeypatch.setattr(digests, "_known", {})
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    paths: list[Path] = []
    whole = digests._read

    def note(fd: int, state: digests._State, path: Path, goes_on: Callable[[], None]) -> bytes:
        paths.append(path)
        return whole(fd, state, path, goes_on)

    monkeypatch.setattr(digests, "_read", note)
    return paths


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_known", {})


def large(path: Path, size: int = REMEMBERED) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def flip(path: Path, at: int) -> None:
    """Changes one bit of a file and leaves its size and mtime as they were."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("at", [0, 12_345_678, PIECE - 1, PIECE, PIECE + 4321, 2 * PIECE + 999])
def test_every_byte_counts(at: int, tmp_path: Path) -> None:
    path = large(tmp_path / "a", 2 * PIECE + 1000)
    before = content_digest(path, tmp_path)
    flip(path, at)
    assert content_digest(path, tmp_path) != before


def test_the_digest_is_of_the_bytes_alone(tmp_path: Path) -> None:
    """So two hosts agree on it. Other pieces would be another digest, and nodes of two versions would not pair."""
    path = tmp_path / "a"
    block = bytes(range(256)) * 4096
    with path.open("wb") as file:
        for _ in range(PIECE // len(block)):
            file.write(block)
        file.write(b"rest")
    pieces = xxhash.xxh3_128_digest(block * (PIECE // len(block))), xxhash.xxh3_128_digest(b"rest")
    wanted = xxhash.xxh3_128_digest((PIECE + 4).to_bytes(8, "little") + b"".join(pieces))
    assert content_digest(path) == wanted
    (tmp_path / "elsewhere").mkdir()
    assert content_digest(Path(shutil.copy(path, tmp_path / "elsewhere" / "b"))) == wanted


def test_a_file_is_read_once_and_again_when_it_has_changed(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = large(tmp_path / "a"), tmp_path / "cache"
    first = content_digest(path, cache)
    forget(monkeypatch)
    assert content_digest(path, cache) == first
    assert read == [path]
    (kept,) = (cache / "digests").glob("*.digest")
    kept.write_bytes(kept.read_bytes()[:-1])
    forget(monkeypatch)
    assert content_digest(path, cache) == first
    assert read == [path] * 2, "a torn digest is none"
    flip(path, 5)
    changed = content_digest(path, cache)
    assert changed != first
    assert read == [path] * 3, "its ctime is another one"


def test_processes_without_a_cache_read_it_once_each(tmp_path: Path, read: list[Path]) -> None:
    path = large(tmp_path / "a")
    assert content_digest(path) == content_digest(path)
    (tmp_path / "cache").touch()
    assert content_digest(path, tmp_path / "cache") == content_digest(path)
    assert read == [path]


def test_a_file_that_has_just_changed_is_not_remembered(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could change once more without another time."""
    monkeypatch.setattr(digests, "_SETTLED_NS", 3600 * 10**9)
    path = large(tmp_path / "a")
    for _ in range(2):
        content_digest(path, tmp_path)
    assert read == [path] * 2


@pytest.mark.parametrize("mtime", ["present", "future"])
def test_a_file_that_had_just_changed_when_its_reading_began_is_not_remembered(
    mtime: str, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could have changed behind the reader, whose reading takes longer than it takes for a file to settle."""
    monkeypatch.setattr(digests, "_SETTLED_NS", 10**9)
    path, piece = large(tmp_path / "a"), digests._piece
    if mtime == "future":
        os.utime(path, ns=(10**19 // 5, 10**19 // 5))

    def until_settled(fd: int, start: int, nbytes: int) -> bytes:
        eventually(lambda: time.time_ns() - path.stat().st_ctime_ns > 1.1 * 10**9)
        return piece(fd, start, nbytes)

    monkeypatch.setattr(digests, "_piece", until_settled)
    for _ in range(2):
        content_digest(path, tmp_path)
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    assert not list((tmp_path / "digests").glob("*.digest")) and not digests._known


def test_engines_that_start_together_read_it_once(
    tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = large(tmp_path / "a")
    begun, go_on, whole = threading.Event(), threading.Event(), digests._read

    def slowly(fd: int, state: digests._State, path: Path, goes_on: Callable[[], None]) -> bytes:
        begun.set()
        assert go_on.wait(10)
        return whole(fd, state, path, goes_on)

    monkeypatch.setattr(digests, "_read", slowly)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(content_digest, path, tmp_path)
        assert begun.wait(10)
        other = pool.submit(content_digest, path, tmp_path)
        go_on.set()
        assert one.result() == other.result()
    assert read == [path]


def test_a_long_read_shows_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that reads says so, or its node would end it, and so does one that waits for another to read."""
    path = large(tmp_path / "a", 2 * PIECE + 1)
    monkeypatch.setattr(cached_files, "_WAITS_S", 0.01)
    begun, go_on, pieces, whole = threading.Event(), threading.Event(), list[int](), digests._read

    def slowly(fd: int, state: digests._State, path: Path, goes_on: Callable[[], None]) -> bytes:
        begun.set()
        assert go_on.wait(10)
        return whole(fd, state, path, goes_on)

    monkeypatch.setattr(digests, "_read", slowly)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(content_digest, path, tmp_path, lambda: pieces.append(1))
        assert begun.wait(10)
        other = pool.submit(content_digest, path, tmp_path, go_on.set)
        assert one.result() == other.result()
    assert len(pieces) == 3


@pytest.mark.parametrize("what", ["file", "folder"])
def test_digests_that_another_user_may_have_written_do_not_count(
    what: str, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = large(tmp_path / "a"), tmp_path / "cache"
    content_digest(path, cache)
    (kept,) = (cache / "digests").glob("*.digest")
    kept.chmod(0o666)
    if what == "folder":
        give_away(kept.parent, monkeypatch)
    forget(monkeypatch)
    content_digest(path, cache)
    assert read == [path] * 2


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = large(tmp_path / "a")
    piece = digests._piece

    def write(fd: int, start: int, nbytes: int) -> bytes:
        flip(path, 3)
        return piece(fd, start, nbytes)

    monkeypatch.setattr(digests, "_piece", write)
    with pytest.raises(ModelError, match="has changed while it was read"):
        content_digest(path, tmp_path)

    def shorten(fd: int, start: int, nbytes: int) -> bytes:
        os.truncate(path, 0)
        return piece(fd, start, nbytes)

    monkeypatch.setattr(digests, "_piece", shorten)
    with pytest.raises(ModelError, match="has changed while it was read"):
        content_digest(path, tmp_path)


def test_one_projection_makes_another_model(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "one", hidden_size=768, intermediate_size=2048)
    same = Path(shutil.copytree(folder, tmp_path / "two"))
    assert fingerprint(folder) == fingerprint(same)
    weights = same / "model.safetensors"
    times, tensors = weights.stat(), load_file(weights)
    tensors["model.layers.1.self_attn.k_proj.weight"].mul_(2)
    save_file(tensors, weights, metadata={"format": "pt"})
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights.stat().st_size == times.st_size
    assert fingerprint(folder) != fingerprint(same)
    assert weights_fingerprint(folder) != weights_fingerprint(same)


OTHERS: list[tuple[str, str | dict[str, object]]] = [
    ("config.json", {"rms_norm_eps": 1e-3}),
    ("generation_config.json", {"eos_token_id": [2, 3]}),
    ("tokenizer_config.json", {"add_bos_token": True}),
    ("tokenizer.json", {"added_tokens": [{"id": 5, "content": "<x>"}]}),
    ("special_tokens_map.json", {"eos_token": "<x>"}),
    ("chat_template.jinja", "{{ messages }}"),
    ("additional_chat_templates/tools.jinja", "{{ tools }}"),
]


@pytest.mark.parametrize(("name", "content"), OTHERS, ids=[name for name, _ in OTHERS])
def test_what_changes_answers_makes_another_model(name: str, content: str | dict[str, object], tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    before, weights, file = fingerprint(folder), weights_fingerprint(folder), folder / name
    file.parent.mkdir(exist_ok=True)
    if isinstance(content, dict):
        had = json.loads(file.read_text()) if file.exists() else {}
        content = json.dumps(had | content)
    file.write_text(content)
    assert fingerprint(folder) != before
    assert (weights_fingerprint(folder) == weights) == (name != "config.json"), "weights are packed for what they are"


def test_where_a_model_came_from_does_not_count(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    before = fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    moved = {"transformers_version": "0", "_name_or_path": "/elsewhere"} | config | {"transformers_version": "9"}
    (folder / "config.json").write_text(json.dumps(dict(reversed(moved.items())), indent=1))
    assert fingerprint(folder) == before


def test_without_weights_there_is_none(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no \.safetensors files"):
        fingerprint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no \.safetensors files|cannot be fingerprinted"):
        fingerprint(folder)
