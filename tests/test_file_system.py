"""Tests that the kind of a file system is told by its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.file_system import file_system


def test_a_file_system_is_told_by_its_number() -> None:
    assert file_system(Path("/proc")) == 0x9FA0
    with Path("/proc/self/stat").open() as file:
        assert file_system(file.fileno()) == 0x9FA0
    with pytest.raises(FileNotFoundError):
        file_system(Path("/proc/none"))
