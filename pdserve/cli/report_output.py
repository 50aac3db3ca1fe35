"""Prints the report of ``pdserve bench`` or ``doctor``, and writes it as JSON where ``--json`` says."""

from __future__ import annotations

import sys
from pathlib import Path

from pdserve.errors import ConfigError

_STANDARD_OUTPUT = "-"


def check_folder(flag: str, file: str) -> None:
    """Raises ConfigError if the folder of the file that ``flag`` names is not there; ``file`` is empty without one."""
    if file and file != _STANDARD_OUTPUT and not Path(file).parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {str(Path(file).parent)!r}")


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
