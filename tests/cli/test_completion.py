"""Tests of the scripts by which shells complete pdserve's command lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pdserve.cli.completion import SHELLS
from pdserve.cli.main import SUBCOMMANDS, main

_ASK_BASH = """
source "$1"
COMP_WORDS=(pdserve "${@:2}")
COMP_CWORD=$(($# - 1))
COMP_LINE="${COMP_WORDS[*]}"
COMP_POINT=${#COMP_LINE}
compopt() { :; }
"$(complete -p pdserve | sed 's/.*-F \\([^ ]*\\).*/\\1/')" pdserve "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def bash_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", "bash"], {}) == 0
    script = tmp_path / "pdserve.bash"
    script.write_text(capsys.readouterr().out)
    return script


def completed(script: Path, *words: str) -> set[str]:
    """Returns what bash offers for the last of ``words``."""
    ask = ["bash", "--norc", "-c", _ASK_BASH, "bash", str(script), *words]
    done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=30)
    assert not done.stderr
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("d",), {"decode", "drain", "doctor"}),
        (("decode", "--max-n"), {"--max-num-seqs", "--max-num-batched-tokens"}),
        (("up", "--dtype", ""), {"bfloat16", "float32"}),
        (("up", "--model", "demo", "--policy"), set()),
        (("bench", "tr"), {"transfer"}),
        (("bench", "transfer", "--block-k"), {"--block-kib"}),
        (("role", "decode-1", "m"), {"mixed"}),
        (("completion", "f"), {"fish"}),
        (("ch",), {"chat"}),
        (("chat", "--mark"), {"--markdown"}),
        (("trace", "--sl"), {"--slowest"}),
    ],
)
def test_bash_offers_what_fits(bash_script: Path, words: tuple[str, ...], offered: set[str]) -> None:
    assert completed(bash_script, *words) == offered


def test_bash_offers_files_where_a_file_is_wanted(bash_script: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.secret").touch()
    assert completed(bash_script, "proxy", "--secret-file", f"{tmp_path}/clus") == {f"{tmp_path}/cluster.secret"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script_with_every_subcommand(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell], {}) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in SUBCOMMANDS)
    assert "max-num-seqs" in script


@pytest.mark.parametrize("argv", [[], ["csh"], ["bash", "zsh"]])
def test_which_shells_there_are_is_told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *argv], {}) == 2
    assert "takes one of bash, zsh, fish, tcsh" in capsys.readouterr().err
