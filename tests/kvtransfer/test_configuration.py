"""Tests which code posts KV blocks, with and without a compiler."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from pdserve.config import UcxCalls
from pdserve.errors import ConfigError
from pdserve.settings import cache_folder
from pdserve_kvtransfer.configuration import chosen_poster
from pdserve_kvtransfer.ucx.compiled_poster import CompiledPoster
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from pdserve_kvtransfer.ucx.ucxx_poster import UcxxPoster


def test_with_a_compiler() -> None:
    for choice, kind in (
        (UcxCalls.AUTO, CompiledPoster),
        (UcxCalls.COMPILED, CompiledPoster),
        (UcxCalls.PYTHON, UcxxPoster),
    ):
        transport = UcxTransport("", make_poster=chosen_poster(choice, cache_folder(os.environ)))
        link = transport.open_link(memoryview(bytearray(1)))
        assert isinstance(link.poster, kind)
        link.close()
        transport.close()


def test_without_a_compiler_python_does_it_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert chosen_poster(UcxCalls.AUTO, tmp_path) is UcxxPoster
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "there is no g++" in caplog.text
    with pytest.raises(ConfigError, match="--ucx-calls compiled: there is no"):
        chosen_poster(UcxCalls.COMPILED, tmp_path)
    caplog.clear()
    assert chosen_poster(UcxCalls.PYTHON, tmp_path) is UcxxPoster
    assert not caplog.records
