"""Makes real sockets in folders of their own, and in one that is gone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import zmq

from pdserve.errors import ConfigError
from pdserve.local_socket import bind, folder_of


def test_a_socket_in_its_folder_takes_connections() -> None:
    with (
        folder_of("the test's socket", prefix="pdserve-") as folder,
        zmq.Context() as context,
        context.socket(zmq.PAIR) as ours,
        context.socket(zmq.PAIR) as theirs,
    ):
        assert Path(folder).stat().st_mode & 0o077 == 0, "nobody else can reach the socket"
        bind(ours, f"ipc://{folder}/socket", "the test's socket")
        theirs.connect(f"ipc://{folder}/socket")
        theirs.send(b"frame")
        assert ours.poll(10_000)
        assert ours.recv() == b"frame"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"no folder for the test's socket can be made: .*No such file.*; TMPDIR may"):
        folder_of("the test's socket", prefix="pdserve-")


def test_a_socket_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        with pytest.raises(ConfigError, match=r"the test's socket cannot be made: .*; TMPDIR may"):
            bind(socket, f"ipc://{tmp_path}/gone/socket", "the test's socket")
        socket.close(0)
