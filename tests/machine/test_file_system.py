"""Tests that the kind of a file system is told by its number, and whose files and folders are trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.machine.file_system import file_system, is_own_file, make_own_folder
from pdserve.settings import cache_folder


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes another user the owner, or where only root may do that, this user another one."""
    if os.geteuid() == 0:
        os.chown(path, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)


def test_a_file_system_is_told_by_its_number() -> None:
    assert file_system(Path("/proc")) == 0x9FA0
    with Path("/proc/self/stat").open() as file:
        assert file_system(file.fileno()) == 0x9FA0
    with pytest.raises(FileNotFoundError):
        file_system(Path("/proc/none"))


def test_a_folder_is_made_for_this_user_and_kept_from_others(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "own"
    make_own_folder(folder)
    assert folder.stat().st_mode & 0o022 == 0
    folder.chmod(0o2775)  # as a umask of 002 leaves it
    make_own_folder(folder)
    assert folder.stat().st_mode & 0o7777 == 0o2755


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(tmp_path, monkeypatch)
    with pytest.raises(PermissionError, match=r"it belongs to another user \(uid \d+\)"):
        make_own_folder(tmp_path)


def test_a_file_is_trusted_if_no_other_user_could_have_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    assert not is_own_file(file)
    file.touch()
    for mode, trusted in ((0o644, True), (0o755, True), (0o664, False), (0o646, False)):
        file.chmod(mode)
        assert is_own_file(file) == trusted
    file.chmod(0o600)
    give_away(file, monkeypatch)
    assert not is_own_file(file)
    assert not is_own_file(tmp_path)


def test_no_command_uses_another_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert cache_folder(environ) == tmp_path / "pdserve"
    (tmp_path / "pdserve").mkdir()
    assert cache_folder(environ) == tmp_path / "pdserve"
    give_away(tmp_path / "pdserve", monkeypatch)
    with pytest.raises(ConfigError, match=r"the cache folder .* another user .* XDG_CACHE_HOME"):
        cache_folder(environ)
