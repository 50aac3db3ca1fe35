"""Tests the command's exit statuses and messages, how its processes end, and the modules that they import."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.in_process import call
from tests.processes import SECRET, clean_environ, pdserve

pytestmark = pytest.mark.integration


def test_alone_it_prints_help_and_fails() -> None:
    command = [sys.executable, "-P", "-m", "pdserve"]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: pdserve SUBCOMMAND" in done.stderr


def test_help_and_version_succeed() -> None:
    assert call("--help").stdout.startswith("usage: pdserve SUBCOMMAND")
    assert call("--version").stdout == f"pdserve {version('pdserve')}\n"


def test_a_reader_that_leaves_ends_the_command_without_a_traceback() -> None:
    """As after ``| head``."""
    environ = clean_environ()
    command = [sys.executable, "-P", "-m", "pdserve", "completion", "bash"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE


def test_a_misspelt_subcommand_is_told_the_nearest() -> None:
    done = call("prefil")
    assert done.returncode == 2
    assert "unknown subcommand 'prefil'; did you mean prefill?" in done.stderr


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("ps", "'pdserve top' shows"),
        ("list", "'pdserve models' lists"),
        ("rm", "in which folder a model is"),
        ("--model", "a subcommand comes before --model, as in 'pdserve up --model'"),
        ("org/name", "pdserve chat org/name"),
        ("wibble", "see pdserve --help"),
    ],
)
def test_a_word_of_another_server_gets_one_sentence(word: str, said: str) -> None:
    done = call(word)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_has_the_name_that_was_typed() -> None:
    said = call("serve", "--help").stdout
    assert said.startswith("usage: pdserve serve [MODEL] [--flag value ...]")
    assert "pdserve serve --help-all" in said and "pdserve up" not in said.partition("Examples:")[2]


def test_run_is_chat() -> None:
    assert call("run", "--help").stdout.startswith("usage: pdserve chat [MODEL|URL [QUESTION]] [--flag value ...]")


@pytest.mark.parametrize(
    ("subcommand", "usage"), [("drain", "drain NODE"), ("role", "role NODE ROLE"), ("trace", "trace [REQUEST_ID]")]
)
def test_usage_shows_what_stands_before_the_flags(subcommand: str, usage: str) -> None:
    assert call(subcommand, "--help").stdout.startswith(f"usage: pdserve {usage} [--flag value ...]")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["role", "node", "chief"], "'chief' is no role; there are prefill, decode, mixed"),
        (["role", "node"], "which role? A node is one of prefill, decode, mixed"),
        (["trace"], "which request?"),
        (["trace", "id", "--failed"], "which request?"),
        (["chat", "--url", "ftp://x"], "--url: 'ftp://x' was given"),
        (["decode", "--model", "/nowhere"], "there is no model '/nowhere'"),
        (["decode", "--model", "/"], "it has no config.json"),
        (["prefill"], "--proxy is needed"),
        (["decode", "--cores", "65000"], "--cores: [65000] are not among the cores of this process"),
        (["decode", "--host", "0.0.0.0"], "a cluster secret is needed to listen on 0.0.0.0"),
        (["proxy", "--control-host", "0.0.0.0"], "a cluster secret is needed to listen on 0.0.0.0"),
        (["proxy", "--blok-size", "1"], "unknown flag --blok-size"),
        (["up", "--model", "/nowhere"], "there is no model '/nowhere'"),
        (["serve", "--prot", "1"], "unknown flag --prot of 'pdserve serve'; did you mean --port?"),
        (["serve", "--port"], "see 'pdserve serve --help'"),
        (["chat", "llama3", "Hello!"], "there is no model 'llama3'"),
        (["chat", "demo"], "standard input is empty"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(argv: list[str], message: str) -> None:
    done = call(*argv)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pdserve {argv[0]}: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_proxy_serves_and_stops_on_sigterm() -> None:
    with pdserve("proxy", "--port", "0", "--control-port", "0") as proxy:
        found = proxy.listening()
        assert found.url.startswith("http://127.0.0.1:")
        assert found.control.startswith("tcp://127.0.0.1:")
        proxy.terminate()
        assert proxy.wait() == 0
        assert SECRET not in proxy.output


def test_the_proxy_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, pdserve.cli.main, pdserve.cli.servers, pdserve_proxy.server\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'ucxx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_users_secret_is_made_in_the_state_folder(tmp_path: Path) -> None:
    with pdserve(
        "proxy", "--port", "0", "--control-port", "0", PDSERVE_SECRET="", XDG_STATE_HOME=str(tmp_path)
    ) as proxy:
        proxy.listening()
    secret = (tmp_path / "pdserve" / "secret").read_text().strip()
    assert len(secret) == 64
    assert secret not in proxy.output
