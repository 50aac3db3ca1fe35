"""Tests that mistakes are found before anything is started, by the programs that people run."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.cli.servers import check_port
from pdserve.cli.start_checks import check_model, check_node
from pdserve.cli.up.command import PROXY_BYTES, StartTimes, _fitted
from pdserve.config import (
    CacheConfig,
    CpuKernels,
    ModelConfig,
    NodeConfig,
    SchedulerConfig,
    Speculate,
    UpConfig,
)
from pdserve.errors import ConfigError
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.weight_form import draft_model_size
from pdserve.models.sizes import LEAST_PROCESS_BYTES, whole_mib
from tests.cli.in_process import call
from tests.processes import SECRET, pdserve

GIB = 2**30


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (("up", "--prefill", "0", "--decode", "0", "--mixed", "1"), "--port"),
        (("proxy", "--control-port", "0"), "--port"),
        (("proxy", "--port", "0"), "--control-port"),
        (("mixed",), "--port"),
        (("decode", "--proxy", "tcp://127.0.0.1:9"), "--transfer-port"),
    ],
)
def test_a_port_that_is_taken_is_told_with_its_flag(command: Sequence[str], flag: str, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        model = () if command[0] == "proxy" else ("--model", str(tiny_model))
        done = call(*command, *model, flag, port, PDSERVE_SECRET=SECRET)
        said = f"{flag} {port} is taken: another program listens on 127.0.0.1:{port}. Stop that, or give another {flag}"
        assert said in done.stderr
        # Nothing has started: the mistake is all that is printed.
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: this machine cannot listen on that address"):
        check_port("192.0.2.1", 0, "--port", "--host")


@pytest.mark.parametrize("command", [("up",), ("mixed", "--port", "0")])
def test_a_context_that_the_model_does_not_know_is_told(command: Sequence[str], tiny_model: Path) -> None:
    flags = ("--port", "0", "--model", str(tiny_model), "--max-model-len", "1000000")
    done = call(*command, *flags, PDSERVE_SECRET=SECRET)
    assert "--max-model-len is 1000000, but the model knows only" in done.stderr
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_a_machine_with_less_memory_than_the_proxy_takes_is_not_taken_for_an_unknown_one(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.cli.up.command.available_memory", lambda: 100 * 2**20)
    monkeypatch.setattr("pdserve.cli.up.command.may_have_gpu", lambda node: False)
    with pytest.raises(ConfigError, match="the memory is too small for this model"):
        _fitted(UpConfig(), NodeConfig(), tiny_model)


@pytest.mark.parametrize("command", ["up", "node"])
def test_a_draft_model_that_does_not_fit_beside_the_model_is_told(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The model alone would."""
    settings, decoder = ModelConfig(max_model_len=64), read_decoder_config(tiny_model)
    draft = draft_model_size(tiny_model, decoder, settings, CpuKernels.AUTO, CacheConfig().block_size)
    memory = draft.weights + LEAST_PROCESS_BYTES + draft.total - 2**20
    monkeypatch.setattr("pdserve.cli.up.command.available_memory", lambda: PROXY_BYTES + memory)
    monkeypatch.setattr("pdserve.cli.start_checks.available_memory", lambda: memory)
    for module in ("up.command", "start_checks"):
        monkeypatch.setattr(f"pdserve.cli.{module}.may_have_gpu", lambda node: False)

    def check(scheduler: SchedulerConfig) -> None:
        if command == "up":
            _fitted(UpConfig(model=settings, scheduler=scheduler), NodeConfig(), tiny_model)
        else:
            check_node(NodeConfig(model=settings, scheduler=scheduler), tiny_model)

    check(SchedulerConfig())
    check(SchedulerConfig(draft_model=str(tiny_model), speculation=Speculate.OFF))
    with pytest.raises(ConfigError, match=rf"MiB, the draft model {whole_mib(draft.total)} and the node's processes"):
        check(SchedulerConfig(draft_model=str(tiny_model)))


def checked(model: Path, memory: int) -> None:
    check_model(model, ModelConfig(max_model_len=64), CacheConfig(), CpuKernels.AUTO, 1, memory, memory)


def test_memory_that_is_too_small_is_told_and_an_unknown_one_is_not(tiny_model: Path) -> None:
    checked(tiny_model, 4 * GIB)
    checked(tiny_model, 0)
    with pytest.raises(ConfigError, match=r"the memory is too small for this model: its weights take \d+ MiB"):
        checked(tiny_model, 2**20)


def test_a_share_of_a_gpu_is_refused_on_a_cpu_at_once(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization is for GPUs"):
        check_model(
            tiny_model,
            ModelConfig(),
            CacheConfig(gpu_memory_utilization=0.5),
            CpuKernels.AUTO,
            ranks=1,
            memory=4 * GIB,
            part=4 * GIB,
        )


def test_the_last_start_is_remembered(tmp_path: Path) -> None:
    times = StartTimes(tmp_path / "cache")
    assert times.expected("demo") is None
    times.note("demo", 12.34)
    times.note("other", 1.0)
    times.note("demo", 9.0)
    assert StartTimes(tmp_path / "cache").expected("demo") == 9.0
    for number in range(40):
        times.note(f"model {number}", 1.0)
    assert times.expected("demo") is None
    assert times.expected("model 39") == 1.0


def test_a_file_of_times_that_cannot_be_read_is_as_if_there_were_none(tmp_path: Path) -> None:
    (tmp_path / "start-times.json").write_text("not JSON")
    times = StartTimes(tmp_path)
    assert times.expected("demo") is None
    times.note("demo", 2.0)
    assert times.expected("demo") == 2.0


def test_a_proxy_that_others_reach_without_keys_warns_and_one_with_keys_does_not() -> None:
    warning = "whoever reaches this proxy may use it, because --host is 0.0.0.0 and there are no API keys"
    command = ("proxy", "--port", "0", "--control-port", "0", "--host")
    for host, environ, warns in (
        ("0.0.0.0", {}, True),
        ("0.0.0.0", {"PDSERVE_API_KEY": "a-key-for-tests-only-0123456789"}, False),
        ("127.0.0.1", {}, False),
    ):
        with pdserve(*command, host, **environ) as proxy:
            proxy.listening()
            assert (warning in proxy.output) == warns, proxy.output
            assert proxy.output.count(" WARNING ") == warns, proxy.output


@pytest.mark.integration
def test_a_node_that_others_reach_and_that_serves_clients_warns(tiny_model: Path) -> None:
    flags = ("--port", "0", "--host", "0.0.0.0", "--model", str(tiny_model), "--kv-cache-mib", "8")
    with pdserve("mixed", *flags) as node:
        node.listening()
        assert "whoever reaches this node may use it, because --host is 0.0.0.0" in node.output
