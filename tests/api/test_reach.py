"""Tests that a node warns of addresses that its proxies and decode nodes cannot use."""

from __future__ import annotations

import pytest

from pdserve.api.node.server import out_of_reach
from pdserve.wire.discovery import Capacity, NodeInfo, Role
from pdserve.wire.version import SPOKEN

LOOPBACK, RACK = "127.0.0.1", "10.0.0.7"
LOCAL, ELSEWHERE, NAMED = "tcp://127.0.0.1:8100", "tcp://10.0.0.9:8100", "tcp://pdserve-control:8100"


def node(role: Role, http: str, transfer: str) -> NodeInfo:
    return NodeInfo(
        protocol=SPOKEN.newest,
        oldest_protocol=SPOKEN.oldest,
        name="n0",
        boot_id=b"b" * 16,
        role=role,
        url=f"http://{http}:8001",
        control=f"tcp://{transfer}:8200",
        model="m",
        fingerprint="f",
        capacity=Capacity(max_running=1, num_blocks=1, block_size=16, max_model_len=64),
    )


@pytest.mark.parametrize(
    ("role", "http", "transfer", "proxies", "flags"),
    [
        (Role.DECODE, LOOPBACK, LOOPBACK, (LOCAL, NAMED), ["--host"]),
        (Role.DECODE, RACK, LOOPBACK, (ELSEWHERE,), []),
        (Role.PREFILL, LOOPBACK, LOOPBACK, (ELSEWHERE,), ["--host", "--transfer-host"]),
        (Role.MIXED, "node-7", "[::1]", (NAMED,), ["--transfer-host"]),
        (Role.PREFILL, RACK, "node-7", (NAMED,), []),
        (Role.PREFILL, LOOPBACK, LOOPBACK, (LOCAL, "tcp://[::1]:8100", "tcp://localhost:8100"), []),
    ],
)
def test_an_address_on_loopback_is_out_of_reach_of_other_machines(
    role: Role, http: str, transfer: str, proxies: tuple[str, ...], flags: list[str]
) -> None:
    found = out_of_reach(node(role, http, transfer), proxies)
    assert len(found) == len(flags)
    for warning, flag in zip(found, flags, strict=True):
        assert f" {flag}" in warning
