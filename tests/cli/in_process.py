"""``pdserve`` in the process of the tests, which starts it a hundred times as quickly as a process of its own."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.cli.main import main
from tests.processes import clean_environ


def call(*argv: str, text: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs ``pdserve <argv>`` with ``text`` on a standard input that is no terminal.

    Returns its exit status and its output, as a process would give them.
    """
    out, err = _stream(), _stream()
    given = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _logging_kept(),
    ):
        patched.setattr("sys.stdin", given)
        try:
            status = main(argv, clean_environ(**environ))
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            status = ended.code
    return subprocess.CompletedProcess(argv, status, _text(out), _text(err))


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _text(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Undoes what a server sets up for its own process."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing"):
            patched.setattr(logging, name, getattr(logging, name))
        yield
