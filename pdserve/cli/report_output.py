"""Prints a report, writes it as JSON where ``--json`` says, and finds what plots it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.bench.report import Report

_STANDARD_OUTPUT = "-"


def check_folder(flag: str, file: str) -> None:
    """Raises ConfigError if the folder of the file that ``flag`` names is not there; ``file`` is empty without one."""
    if file and file != _STANDARD_OUTPUT and not Path(file).parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {str(Path(file).parent)!r}")


def plotter(module: str) -> Callable[[Report, Path], None]:
    """Returns ``write_plot`` of ``module``. It is called before the measurement, which takes minutes."""
    try:
        write_plot: Callable[[Report, Path], None] = importlib.import_module(module).write_plot
    except ImportError as exc:
        raise ConfigError(
            "--plot takes matplotlib, which pdserve's extra 'bench' brings: pip install matplotlib"
        ) from exc
    return write_plot


def publish(text: str, json: bytes, json_file: str) -> None:
    """Prints ``text``, and writes ``json`` to ``json_file`` unless that is empty. Raises ConfigError if it cannot.

    Where ``json_file`` is ``-``, standard output gets the JSON alone, and standard error the text.
    """
    if json_file == _STANDARD_OUTPUT:
        print(text, file=sys.stderr)
        print(json.decode(), end="")
        return
    print(text)
    if json_file:
        try:
            Path(json_file).write_bytes(json)
        except OSError as exc:
            raise ConfigError(f"--json: cannot write {json_file}: {exc.strerror}") from exc
