"""Tests the file of packed weights: who fills it, who uses it, and that nobody uses one that is not whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from pdserve.models.checkpoint import weight_file
from pdserve.models.checkpoint.weight_file import WeightDraft, WeightFile, kept_weights, weights_name
from pdserve_kernels.cpu.weight_memory import LINE, FilledMemory
from tests.machine.test_file_system import give_away
from tests.tiny_models import save_tiny_model

EXT4 = 0xEF53
SIZES = {"small": 100, "odd": 4097, "large": 9 * 2**20, "smaller": 1}


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files may be in memory here."""
    monkeypatch.setattr(weight_file, "file_system", lambda folder: EXT4)


class OwnMemory:
    """Satisfies ``FilledMemory`` as an engine's own memory does, and notes how much is taken."""

    def __init__(self) -> None:
        self.taken = 0

    def filled(self, key: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        self.taken += nbytes
        memory = torch.empty(nbytes, dtype=torch.uint8)
        fill(memory)
        return memory


def written(key: str, nbytes: int) -> torch.Tensor:
    return torch.arange(len(key), len(key) + nbytes).to(torch.uint8)


def fill_all(memory: FilledMemory, packed: list[str]) -> dict[str, torch.Tensor]:
    """Returns the bytes of all keys, and notes in ``packed`` which had to be written."""

    def fill(key: str) -> Callable[[torch.Tensor], None]:
        def write(to: torch.Tensor) -> None:
            packed.append(key)
            to.copy_(written(key, len(to)))

        return write

    return {key: memory.filled(key, nbytes, fill(key)) for key, nbytes in SIZES.items()}


def load(path: Path, own: OwnMemory, most_mib: int = 100, ranks: int = 1) -> tuple[list[str], dict[str, torch.Tensor]]:
    packed: list[str] = []
    with kept_weights(path, 2**20, most_mib, own, ranks) as memory:
        return packed, fill_all(memory, packed)


def mapped(path: Path) -> bool:
    return any(line.rstrip().endswith(str(path)) for line in Path("/proc/self/maps").read_text().splitlines())


def test_the_first_packs_and_the_others_map(tmp_path: Path) -> None:
    path, own = tmp_path / "kept" / "a.weights", OwnMemory()
    packed, first = load(path, own)
    assert packed == list(SIZES)
    assert mapped(path), "the first one uses the file itself"
    again, second = load(path, own)
    assert (again, own.taken) == ([], 0)
    for key, nbytes in SIZES.items():
        assert torch.equal(first[key], written(key, nbytes))
        assert torch.equal(second[key], first[key])
        assert first[key].data_ptr() % LINE == second[key].data_ptr() % LINE == 0
    assert {each.name for each in path.parent.iterdir()} == {"a.weights", "a.lock"}
    assert path.stat().st_mode & 0o222 == 0
    del first, second
    assert not mapped(path)


def test_what_the_file_has_not_is_the_engines_own(tmp_path: Path) -> None:
    path, own = tmp_path / "a.weights", OwnMemory()
    load(path, own)
    found = WeightFile(path, own)
    for key, nbytes in (("", 10), ("unknown", 20), ("small", 101)):
        found.filled(key, nbytes, lambda to: None)
    assert own.taken == 10 + 20 + 101


def test_a_key_that_comes_twice_has_memory_of_its_own(tmp_path: Path) -> None:
    own = OwnMemory()
    draft = WeightDraft(tmp_path / "a.weights", own)
    one, two = (draft.filled("k", 8, lambda to: None) for _ in range(2))
    assert one.data_ptr() != two.data_ptr()
    assert own.taken == 8
    draft.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loss", ["end", "all", "page", "index", "mark"])
def test_a_torn_file_is_packed_anew(loss: str, tmp_path: Path) -> None:
    path = tmp_path / "a.weights"
    load(path, OwnMemory())
    whole = path.read_bytes()
    torn = bytearray(whole)
    match loss:
        case "end":
            del torn[-4096:]
        case "all":
            torn.clear()
        case "page":
            torn[4096:8192] = bytes(4096)
        case "index":
            torn[-60] ^= 1
        case "mark":
            torn[-40] ^= 1
    path.unlink()
    path.write_bytes(torn)
    own = OwnMemory()
    packed, found = load(path, own)
    assert (packed, own.taken) == (list(SIZES), 0)
    assert torch.equal(found["odd"], written("odd", SIZES["odd"]))
    assert path.read_bytes() == whole


def test_nothing_is_left_where_loading_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), kept_weights(tmp_path / "a.weights", 1, 100, OwnMemory()) as memory:
        memory.filled("k", 8, lambda to: None)
        raise KeyError
    assert [each.name for each in tmp_path.iterdir()] == ["a.lock"]


@pytest.mark.parametrize(("call", "error"), [("pwrite", errno.ENOSPC), ("fsync", errno.EIO)])
def test_no_file_where_the_disk_fails(call: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(error, "the disk fails")

    monkeypatch.setattr(os, call, fail)
    packed, found = load(tmp_path / "a.weights", OwnMemory())
    assert packed == list(SIZES)
    assert torch.equal(found["large"], written("large", SIZES["large"]))
    assert [each.name for each in tmp_path.iterdir()] == ["a.lock"]


def test_no_file_beyond_what_may_be_kept(tmp_path: Path) -> None:
    own = OwnMemory()
    load(tmp_path / "a.weights", own, most_mib=0)
    assert own.taken == sum(SIZES.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("most_mib", "ranks"), [(30, 1), (80, 2)])
def test_what_is_too_large_once_it_is_packed_costs_no_other_file(
    most_mib: int, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path / "old.weights", OwnMemory())
    packed, found = load(tmp_path / "a.weights", OwnMemory(), most_mib, ranks)
    assert packed == list(SIZES)
    assert torch.equal(found["large"], written("large", SIZES["large"]))
    assert [each.name for each in tmp_path.glob("*.weights")] == ["old.weights"]
    assert f"--packed-weights-mib is {most_mib}" in caplog.text


def test_no_file_of_nothing(tmp_path: Path) -> None:
    with kept_weights(tmp_path / "a.weights", 1, 100, OwnMemory()) as memory:
        memory.filled("", 8, lambda to: None)
    assert [each.name for each in tmp_path.iterdir()] == ["a.lock"]


@pytest.mark.parametrize("kind", ["NFS", "CIFS", "FUSE", "tmpfs"])
def test_no_file_where_other_machines_may_remove_it_or_in_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path / "a.weights", OwnMemory())
    (magic,) = (number for number, name in weight_file._UNFIT_FILE_SYSTEMS.items() if name == kind)
    monkeypatch.setattr(weight_file, "file_system", lambda folder: magic)
    for name in ("a", "b"):
        own = OwnMemory()
        load(tmp_path / f"{name}.weights", own)
        assert own.taken == sum(SIZES.values())
    assert not (tmp_path / "b.weights").exists()


def test_a_file_that_is_only_read_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, own = tmp_path / "a.weights", OwnMemory()
    load(path, own)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    packed, _ = load(path, own)
    assert (packed, own.taken) == ([], 0)


def test_a_file_that_another_process_removes_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "gone.weights").symlink_to("nowhere")
    path = tmp_path / "a.weights"
    (tmp_path / "dead.draft").touch()
    load(path, OwnMemory())
    assert path.is_file()
    assert not (tmp_path / "dead.draft").exists()


def test_the_oldest_go_and_what_the_dead_have_left(tmp_path: Path) -> None:
    (tmp_path / "dead.draft").touch()
    (tmp_path / "alive.draft").touch()
    with FileLock(tmp_path / "alive.lock"):
        for number, name in enumerate("abc"):
            load(tmp_path / f"{name}.weights", OwnMemory(), most_mib=80)
            os.utime(tmp_path / f"{name}.weights", ns=(number, number))
        load(tmp_path / "d.weights", OwnMemory(), most_mib=100)
    # Each has two pieces: the large one, and the one that the small ones share.
    assert {each.name for each in tmp_path.glob("*.weights")} == {"c.weights", "d.weights"}
    assert {each.name for each in tmp_path.glob("*.draft")} == {"alive.draft"}


def test_who_waits_too_long_packs_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "LOCK_TIMEOUT_S", 0.01)
    own = OwnMemory()
    with FileLock(tmp_path / "a.lock"):
        load(tmp_path / "a.weights", own)
    assert own.taken == sum(SIZES.values())


def test_other_code_makes_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    names = {weights_name(model, tmp_path)[0]}
    code = tmp_path / "code.py"
    monkeypatch.setattr(weight_file, "_sources", lambda: [code])
    for text in ("one", "two", "two"):
        code.write_text(text)
        names.add(weights_name(model, tmp_path)[0])
    assert len(names) == 3


def test_a_name_for_each_form_of_each_model(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    weights = model / "model.safetensors"
    name, nbytes = weights_name(model, tmp_path, "bf16", 0)
    assert nbytes == weights.stat().st_size
    assert weights_name(model, tmp_path, "bf16", 0) == (name, nbytes)
    times = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as the layers of an image and ``cp -p`` leave it
    assert len({name, *(weights_name(model, tmp_path, "bf16", rank)[0] for rank in (0, 1))}) == 3


@pytest.mark.parametrize("what", ["file", "folder"])
def test_weights_that_another_user_may_have_packed_are_not_used(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, own = tmp_path / "kept" / "a.weights", OwnMemory()
    load(path, own)
    if what == "file":
        path.chmod(0o666)
    else:
        give_away(path.parent, monkeypatch)
    packed, _ = load(path, own)
    assert packed == list(SIZES)
    assert own.taken == (0 if what == "file" else sum(SIZES.values()))
