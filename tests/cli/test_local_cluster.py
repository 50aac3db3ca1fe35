"""Tests which processes ``pdserve up`` would start."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli.up.cluster import child_environ, node_command, plan_nodes, proxy_command
from pdserve.config import ClusterConfig, LogLevel, NodeConfig, ProxyConfig, UpConfig
from pdserve.process import Listening, partition_cores
from pdserve.settings import load


@given(st.lists(st.integers(0, 500), min_size=1, max_size=40, unique=True), st.integers(1, 40))
def test_cores_are_shared_evenly(cores: list[int], parts: int) -> None:
    shares = partition_cores(cores, parts)
    assert len(shares) == parts
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    if parts <= len(cores):
        assert [core for share in shares for core in share] == cores
    else:
        assert all(len(share) == 1 for share in shares)
        assert {core for share in shares for core in share} == set(cores)


def test_prefill_gets_the_odd_core() -> None:
    nodes = plan_nodes(ClusterConfig(prefill=1, decode=1), [0, 1, 2])
    assert [(node.name, node.cores) for node in nodes] == [("prefill-0", (0, 1)), ("decode-0", (2,))]


def test_few_cores_are_shared_in_turn() -> None:
    nodes = plan_nodes(ClusterConfig(prefill=1, decode=2), [4, 5])
    assert [node.cores for node in nodes] == [(4,), (5,), (4,)]


def test_a_mixed_cluster() -> None:
    nodes = plan_nodes(ClusterConfig(prefill=0, decode=0, mixed=1), [0, 1])
    assert [(node.name, node.cores) for node in nodes] == [("mixed-0", (0, 1))]


def up(*argv: str, **environ: str) -> UpConfig:
    return load(UpConfig, argv, environ, prog="pdserve up")


def test_a_node_gets_the_clusters_settings_and_an_address_of_its_own() -> None:
    config = up("--host", "0.0.0.0", "--port", "9000", "--block-size", "32", "--dtype", "fp32")
    surroundings = {"PDSERVE_TRANSFER_HOST": "0.0.0.0", "PDSERVE_ADVERTISE": "http://x:1"}
    surroundings |= {"PDSERVE_UCX_TLS": "tcp", "PDSERVE_UCX_NET_DEVICES": "eth0"}
    environ = child_environ(config, surroundings, "s" * 16, "")
    (node,) = plan_nodes(ClusterConfig(prefill=0, decode=1), [0])
    argv = node_command(node, "tcp://127.0.0.1:5")
    child = load(NodeConfig, argv[argv.index("decode") + 1 :], environ, prog="pdserve decode")
    assert child.cache.block_size == 32
    assert child.model.dtype == config.model.dtype
    assert (child.http.host, child.http.port, child.http.advertise) == ("127.0.0.1", 0, "")
    assert (child.transfer.host, child.transfer.port) == ("127.0.0.1", 0)
    assert child.transfer.ucx_tls == "tcp"
    assert child.transfer.ucx_net_devices == "lo"
    assert child.discovery.proxies == ("tcp://127.0.0.1:5",)
    assert child.security.secret == "s" * 16
    assert child.cpu.cores == (0,)


def test_the_proxy_gets_the_public_address() -> None:
    config = up("--host", "0.0.0.0", "--port", "9000")
    argv = proxy_command(config.http, 9100)
    environ = child_environ(config, {"PDSERVE_CONTROL_HOST": "0.0.0.0"}, "s" * 16, "")
    proxy = load(ProxyConfig, argv[argv.index("proxy") + 1 :], environ, prog="pdserve proxy")
    assert (proxy.http.host, proxy.http.port) == ("0.0.0.0", 9000)
    assert (proxy.registry.control_host, proxy.registry.control_port) == ("127.0.0.1", 9100)


def test_a_proxy_that_is_started_again_keeps_its_addresses() -> None:
    config = up("--host", "0.0.0.0", "--port", "0")
    argv = proxy_command(config.http, 9100, Listening("https://127.0.0.1:9000", "tcp://127.0.0.1:9100"))
    proxy = load(ProxyConfig, argv[argv.index("proxy") + 1 :], {}, prog="pdserve proxy")
    assert (proxy.http.host, proxy.http.port, proxy.registry.control_port) == ("0.0.0.0", 9000, 9100)


def test_no_command_line_shows_the_secret() -> None:
    config = up("--secret", "hunter2hunter2hunter2")
    (node,) = plan_nodes(ClusterConfig(prefill=0, decode=1), [0])
    assert "hunter2" not in " ".join([*proxy_command(config.http, 5), *node_command(node, "tcp://a:1")])


def test_settings_of_nodes_in_the_file_reach_the_nodes(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[transfer]\ntransfer-lease-ms = 9000\n[cache]\nblock-size = 64\n")
    environ = child_environ(up("--config", str(file), "--block-size", "8"), {}, "s" * 16, str(file))
    child = load(NodeConfig, [], environ, prog="pdserve decode")
    assert child.transfer.lease_ms == 9000
    assert child.cache.block_size == 8


@pytest.mark.parametrize(
    ("argv", "environ", "file", "ledger"),
    [
        ((), {}, "", "/own"),
        ((), {"PDSERVE_CORE_LEDGER": "/named"}, "", "/named"),
        ((), {}, "/in-file", "/in-file"),
        ((), {"PDSERVE_CORE_LEDGER": "/named"}, "/in-file", "/named"),
        (("--lend-cores", "off"), {"PDSERVE_CORE_LEDGER": "/named"}, "/in-file", ""),
    ],
    ids=["own", "environment", "file", "environment-before-file", "off"],
)
def test_the_users_core_ledger_goes_before_the_clusters(
    tmp_path: Path, argv: tuple[str, ...], environ: dict[str, str], file: str, ledger: str
) -> None:
    settings = tmp_path / "cluster.toml"
    settings.write_text(f'[cpu]\ncore-ledger = "{file}"\n' if file else "")
    config = up("--config", str(settings), *argv)
    given = child_environ(config, environ, "s" * 16, str(settings), Path("/own"))
    assert load(NodeConfig, [], given, prog="pdserve decode").cpu.core_ledger == ledger


@pytest.mark.parametrize(("level", "given"), [("error", "info"), ("info", "info"), ("debug", "debug")])
def test_processes_log_enough_to_say_where_they_listen(level: str, given: str) -> None:
    environ = child_environ(up("--log-level", level), {}, "s" * 16, "")
    assert load(NodeConfig, [], environ, prog="pdserve decode").log.level is LogLevel(given)
