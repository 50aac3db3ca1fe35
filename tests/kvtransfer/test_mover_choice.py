"""Which code posts KV blocks, where there is a compiler and where there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pdserve.config import UcxCalls
from pdserve.errors import ConfigError
from pdserve_kvtransfer.compiled_mover import CompiledMover
from pdserve_kvtransfer.mover_choice import chosen_mover
from pdserve_kvtransfer.ucx import UcxTransport
from pdserve_kvtransfer.ucxx_mover import UcxxMover


def test_with_a_compiler(tmp_path: Path) -> None:
    for choice, kind in (
        (UcxCalls.AUTO, CompiledMover),
        (UcxCalls.COMPILED, CompiledMover),
        (UcxCalls.PYTHON, UcxxMover),
    ):
        transport = UcxTransport("", make_mover=chosen_mover(choice, tmp_path))
        link = transport.open_link(memoryview(bytearray(1)))
        assert isinstance(link.mover, kind)
        link.close()
        transport.close()


def test_without_a_compiler_python_does_it_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert chosen_mover(UcxCalls.AUTO, tmp_path) is UcxxMover
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "there is no g++" in caplog.text
    with pytest.raises(ConfigError, match="--ucx-calls compiled: there is no"):
        chosen_mover(UcxCalls.COMPILED, tmp_path)
    caplog.clear()
    assert chosen_mover(UcxCalls.PYTHON, tmp_path) is UcxxMover
    assert not caplog.records
