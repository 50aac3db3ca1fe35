"""Runs ``pdserve doctor`` as users do: alone, and against a real proxy and prefill node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from pdserve.cli.main import main
from tests.cluster.nodes import Cluster, cluster, http
from tests.processes import SECRET, clean_environ

pytestmark = pytest.mark.integration

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Running:
    """A cluster, its model, and its prefill node's control address."""

    cluster: Cluster
    model: Path
    control: str


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[Running]:
    with cluster(tiny_model, "--dtype", "fp32", "--cpu-kernels", "torch", decode=0) as made:
        (control,) = {one["control"] for one in http(made.url + "/instances").json() if one["role"] == "prefill"}
        yield Running(made, tiny_model, control)


@dataclass(frozen=True)
class Examined:
    status: int
    text: str
    report: dict[str, Any]

    def seen(self, check: str, verdict: str) -> list[str]:
        """Returns what the findings with this verdict say, of checks whose names begin with ``check``."""
        return [
            found["seen"]
            for found in self.report["findings"]
            if found["verdict"] == verdict and found["check"].startswith(check)
        ]


Doctor: TypeAlias = Callable[..., Examined]


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Returns a function that runs the doctor in this process."""

    def run(*flags: str, secret: str = SECRET) -> Examined:
        file = tmp_path / "report.json"
        status = main(["doctor", "--json", str(file), *flags], clean_environ(PDSERVE_SECRET=secret))
        captured = capsys.readouterr()
        assert file.exists(), captured.err
        return Examined(status, captured.out, json.loads(file.read_bytes()))

    return run


def test_a_cluster_that_fits(running: Running, doctor: Doctor) -> None:
    flags = ["--proxy-url", running.cluster.url, "--model", str(running.model), "--dtype", "fp32"]
    found = doctor(*flags, "--probe-mib", "8")
    assert found.status == 0, found.text
    peer = f"peer {running.control.removeprefix('tcp://')}"
    assert any("the same secret" in seen for seen in found.seen(peer, "ok"))
    assert any("the same model" in seen for seen in found.seen(peer, "ok"))
    assert any("the handshake stands" in seen for seen in found.seen(peer, "ok"))
    assert "knows 1 prefill" in found.seen("proxy", "ok")[0]
    assert "memory" in found.seen("transport", "ok")[0]
    (probe,) = found.report["probes"]
    assert probe["same_machine"] and probe["measured"]["bytes_per_s"] > 0 and probe["yardstick"]["bytes_per_s"] > 0
    assert all(node.idle for node in running.cluster.nodes)


def test_a_misfit_is_named_by_field(running: Running, doctor: Doctor) -> None:
    flags = ["--peer", running.control, "--model", str(running.model), "--dtype", "bf16", "--block-size", "32"]
    found = doctor(*flags, "--probe", "off")
    assert found.status == 1, found.text
    assert found.seen("peer", "problem") == [
        "dtype is fp32 there and bf16 here",
        "block_size is 16 there and 32 here",
        "the handshake is refused for dtype",
    ]
    assert "give both the same --dtype" in found.text
    assert found.report["probes"] == []


def test_another_secret_and_nobody(running: Running, doctor: Doctor) -> None:
    flags = ["--peer", running.control, "--peer", "tcp://127.0.0.1:1", "--peer-timeout-s", "0.5"]
    found = doctor(*flags, secret="the secret of some other cluster")
    assert found.status == 1, found.text
    assert found.seen("peer", "problem") == [
        "it takes connections and does not answer signed messages",
        "nobody listens there",
    ]
    assert "give both the same --secret-file" in " ".join(found.text.split())


def test_transports_that_do_not_meet(running: Running, doctor: Doctor) -> None:
    found = doctor("--peer", running.control, "--ucx-tls", "tcp", "--probe-mib", "8")
    assert found.status == 0, found.text
    assert any("although both are on one machine" in seen for seen in found.seen("transport", "warning"))
    assert "add sm to --ucx-tls" in " ".join(found.text.split())


def test_without_peers_two_processes_here_are_measured() -> None:
    command = [sys.executable, "-P", "-m", "pdserve", "doctor", "--probe-mib", "8"]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert re.search(r"ok transport here KV blocks travel by \S+ on memory", text)
    assert re.search(r"bandwidth here \S+ GB/s in blocks of 360 KiB; ucx_perftest: \S+ GB/s", text)
    assert "checks: 0 problems" in text
    assert done.stderr == "", "nothing of UCX's own"


def test_a_probe_that_cannot_be_made_is_a_problem(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.doctor.probe.sys.executable", "/bin/false")
    found = doctor()
    assert found.status == 1, found.text
    assert len(found.seen("probe here", "problem")) == 1


def test_json_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--probe", "off"], {"HOME": "/nowhere", "PDSERVE_SECRET": SECRET}) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"]
    assert "checks: 0 problems" in captured.err


def test_peers_beyond_this_machine_need_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--probe", "off", "--peer", "tcp://192.0.2.77:8200"], {"HOME": "/nowhere"}) == 1
    assert "a cluster secret is needed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--peer", "10.0.0.7:8200"], "--peer"),
        (["--proxy-url", "tcp://10.0.0.7:8200"], "--proxy-url"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--json", "/no/such/folder/report.json"], "--json"),
    ],
)
def test_wrong_settings_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--probe", "off", *flags], {"HOME": "/nowhere", "PDSERVE_SECRET": SECRET}) == 2
    assert said in capsys.readouterr().err
