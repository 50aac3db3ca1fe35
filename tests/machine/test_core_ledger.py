"""Tests the core ledger's file, and who is taken for dead."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.machine.core_ledger import HEADER_BYTES, MAGIC, CoreLedger, CoreState, CoreWord, private_ledger
from tests.core_words import write
from tests.machine.test_file_system import give_away


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def nobody(engine: int) -> None:
    raise AssertionError(f"engine {engine} is in the ledger")


def test_the_first_engine_makes_the_file_for_its_user_alone(path: Path) -> None:
    with CoreLedger(path) as one, CoreLedger(path) as other:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        nothing = CoreWord(CoreState.NOBODYS, 0, 0)
        assert one.read() == other.read()
        assert set(one.read()) == {nothing}
        assert len(one.read()) > max(os.sched_getaffinity(0))
        write(one, 0, CoreWord(CoreState.WANTED, 1000, 7))
        assert other.read()[0] == CoreWord(CoreState.WANTED, 1000, 7)


def test_cores_may_have_larger_numbers_than_there_are_cores(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5000})
    with CoreLedger(path) as ledger:
        assert len(ledger.read()) == 5001


@pytest.mark.parametrize("size", [1, HEADER_BYTES, HEADER_BYTES + 64])
def test_a_file_whose_maker_died_is_made_anew(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))
    with CoreLedger(path) as ledger:
        assert ledger.join(nobody) == 1
    assert path.read_bytes().startswith(MAGIC)


def test_a_full_file_system_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        os.ftruncate(fd, 64)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left"):
        CoreLedger(path)
    assert path.stat().st_size == 0


@pytest.mark.parametrize(
    "content", [b"x", MAGIC, bytes(HEADER_BYTES + 63) + b"x", MAGIC.ljust(HEADER_BYTES + 65, b"\0")]
)
def test_another_file_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--core-ledger .*: it is no core ledger"):
        CoreLedger(path)
    assert path.read_bytes() == content


def test_a_link_is_not_followed_to_a_file_of_this_users(path: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_bytes(b"")
    path.symlink_to(own)
    with pytest.raises(ConfigError, match=r"--core-ledger .*: it is a link"):
        CoreLedger(path)
    assert own.read_bytes() == b""
    (tmp_path / "new").symlink_to(tmp_path / "made")
    with pytest.raises(ConfigError, match="it is a link"):
        CoreLedger(tmp_path / "new")
    assert not (tmp_path / "made").exists()


def test_others_cannot_have_written_to_a_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CoreLedger(path).close()
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="its mode, 666, lets other users in"):
        CoreLedger(path)
    path.chmod(0o600)
    give_away(path, monkeypatch)
    with pytest.raises(ConfigError, match="it belongs to another user"):
        CoreLedger(path)


def test_a_path_that_cannot_be_a_ledger(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "ledger"):
        with pytest.raises(ConfigError, match="--core-ledger"):
            CoreLedger(path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="no regular file"):
        CoreLedger(tmp_path / "fifo")


def test_a_number_is_an_engines_until_it_closes(path: Path) -> None:
    with CoreLedger(path) as first, CoreLedger(path) as second:
        assert (first.join(nobody), second.join(nobody)) == (1, 2)
        with CoreLedger(path) as third:
            assert third.join(nobody) == 3
            write(third, 0, CoreWord(CoreState.LENT, 3, 2))
            first.forget_dead(nobody)
            assert first.engines() == third.engines() == 3
        dead: list[int] = []
        first.forget_dead(dead.append)
        assert dead == [3]
        assert first.engines() == 2


def test_who_joins_forgets_the_dead(path: Path) -> None:
    with CoreLedger(path) as first, CoreLedger(path) as second:
        assert first.join(nobody) == 1
        write(second, 0, CoreWord(CoreState.LENT, 2, 9))
        dead: list[int] = []
        assert second.join(dead.append) == 2
        assert dead == [2, 9]


def test_the_ledger_begins_anew_where_no_engine_lives(path: Path) -> None:
    with CoreLedger(path) as first:
        # A word that names no engine, so nobody would ever be forgotten.
        write(first, 0, CoreWord(CoreState.SHARED, 0, 0))
        with CoreLedger(path) as second:
            assert second.join(nobody) == 1
        assert first.read()[0] == CoreWord(CoreState.NOBODYS, 0, 0)


def test_a_private_ledger_has_no_file() -> None:
    with private_ledger() as path, CoreLedger(path) as one, CoreLedger(path) as other:
        assert (one.join(nobody), other.join(nobody)) == (1, 2)
    assert not path.exists()
