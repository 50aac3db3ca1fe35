"""Tests the core ledger's file, and who is taken for dead."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pdserve.core_ledger import HEADER_BYTES, MAGIC, CoreLedger, CoreState, CoreWord, private_ledger
from pdserve.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def write(ledger: CoreLedger, core: int, state: CoreState, owner: int, borrower: int) -> None:
    """Sets a core's word as the kernels do."""
    word = state | owner << 16 | borrower << 32
    with ledger.words as words:
        words[core * 64 : core * 64 + 8] = word.to_bytes(8, "little")


def nobody(engine: int) -> None:
    raise AssertionError(f"engine {engine} is in the ledger")


def test_the_first_engine_makes_the_file_for_its_user_alone(path: Path) -> None:
    with CoreLedger(path) as one, CoreLedger(path) as other:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        nothing = CoreWord(CoreState.NOBODYS, 0, 0)
        assert one.read() == other.read() == [nothing] * (os.cpu_count() or 1)
        write(one, 0, CoreState.WANTED, 1000, 7)
        assert other.read()[0] == CoreWord(CoreState.WANTED, 1000, 7)


@pytest.mark.parametrize("content", [b"x", MAGIC, bytes(HEADER_BYTES + 64), MAGIC.ljust(HEADER_BYTES + 65, b"\0")])
def test_another_file_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--core-ledger .*: it is no core ledger"):
        CoreLedger(path)
    assert path.read_bytes() == content


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
            write(third, 0, CoreState.LENT, 3, 2)
            first.forget_dead(nobody)
        dead: list[int] = []
        first.forget_dead(dead.append)
        assert dead == [3]


def test_who_joins_forgets_the_dead(path: Path) -> None:
    with CoreLedger(path) as first:
        write(first, 0, CoreState.LENT, 1, 9)
        dead: list[int] = []
        assert first.join(dead.append) == 1
        assert dead == [1, 9]


def test_a_private_ledger_has_no_file() -> None:
    with private_ledger() as path, CoreLedger(path) as one, CoreLedger(path) as other:
        assert (one.join(nobody), other.join(nobody)) == (1, 2)
    assert not path.exists()
