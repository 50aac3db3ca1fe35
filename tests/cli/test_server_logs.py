"""Tests of the files in which ``pdserve up`` keeps what its servers write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.cli.up import output as module
from pdserve.cli.up.output import AGAIN_S, REMEMBERED_RUNS, ServerLogs, server_logs


def test_each_server_has_a_file_that_only_the_user_can_read(tmp_path: Path) -> None:
    with server_logs(tmp_path / "logs") as logs:
        logs.write("proxy", "one")
        logs.write("decode-0", "two")
        logs.write("proxy", "three \udcff")
        assert logs.path("proxy").read_text() == "one\nthree ?\n"
    assert logs.path("decode-0").read_text() == "two\n"
    assert logs.folder.stat().st_mode & 0o077 == 0


def test_a_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with server_logs(tmp_path) as logs:
        for number in range(100):
            logs.write("proxy", f"line {number}")
        sizes = {path.name: path.stat().st_size for path in logs.folder.iterdir()}
        assert set(sizes) == {"proxy.log", "proxy.log.1"}
        assert max(sizes.values()) <= 100
        assert logs.path("proxy").read_text().endswith("line 99\n")


def test_old_runs_are_removed_unless_they_go_on(tmp_path: Path) -> None:
    gone = [tmp_path / f"20260101-0000{number:02}-{2**22 + number}" for number in range(REMEMBERED_RUNS + 3)]
    serving = tmp_path / f"20250101-000000-{os.getpid()}"
    other = tmp_path / "notes"
    for folder in (*gone, serving, other):
        folder.mkdir()
    with server_logs(tmp_path) as logs:
        assert {path.name for path in tmp_path.iterdir()} == {
            *(folder.name for folder in gone[-REMEMBERED_RUNS + 1 :]),
            serving.name,
            other.name,
            logs.folder.name,
        }


def test_a_disk_that_takes_no_more_stops_nothing(tmp_path: Path) -> None:
    with server_logs(tmp_path) as logs:
        logs.path("proxy").symlink_to("/dev/full")
        logs.write("proxy", "one")
        logs.write("proxy", "two")
        logs.write("decode-0", "three")
        assert logs.path("decode-0").read_text() == "three\n"


def test_a_file_that_failed_is_tried_again_and_the_user_is_told(tmp_path: Path) -> None:
    now, told = 0.0, list[str]()
    logs = ServerLogs(tmp_path, told.append, lambda: now)
    path = logs.path("proxy")
    path.symlink_to("/dev/full")
    for number in range(3):
        logs.write("proxy", f"line {number}")
    assert len(told) == 1
    assert "cannot be written" in told[0]
    path.unlink()
    logs.write("proxy", "too early")
    assert not path.exists()
    now = AGAIN_S
    for line in ("later", "last"):
        logs.write("proxy", line)
    logs.close()
    assert path.read_text() == "[4 lines could not be written]\nlater\nlast\n"
    assert told[1:] == [f"{path} can be written again; 4 lines are missing"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"), server_logs(tmp_path / "logs"):
        pass
