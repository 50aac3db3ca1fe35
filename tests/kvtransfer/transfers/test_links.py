"""Tests that the log and the counters of both engines name what carries their blocks, and why it is not RDMA."""

from __future__ import annotations

import logging

import pytest

from pdserve.config import TransferConfig
from pdserve.wire.discovery import LinkCounts, TransportKind
from pdserve_kvtransfer.ucx import ucx_transport
from pdserve_kvtransfer.ucx.rdma_ports import RdmaPort
from pdserve_kvtransfer.ucx.ucx_library import loaded_ucx
from tests.eventually import eventually
from tests.kvtransfer.rig import Engine, pair
from tests.kvtransfer.transfers.test_transfer import complete

PORT = RdmaPort("mlx5_0", 1, "1: DOWN", "3: Disabled", "", "Ethernet", (), 0)


@pytest.mark.parametrize(
    ("shares", "tls", "kind", "lanes", "level"),
    [
        (True, "", TransportKind.MAPPED, "mapped memory of the sender", logging.INFO),
        (False, "", TransportKind.SHARED_MEMORY, "on memory", logging.INFO),
        (False, "tcp", TransportKind.TCP, "tcp on lo, and not by RDMA: ", logging.WARNING),
    ],
    ids=["mapped", "shared memory", "tcp"],
)
def test_each_link_is_named_once_and_counted_while_it_is_open(
    shares: bool,
    tls: str,
    kind: TransportKind,
    lanes: str,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Engine, "shares", shares)
    monkeypatch.setattr(ucx_transport, "read_rdma", lambda: [PORT])
    config = TransferConfig(heartbeat_ms=50, lease_ms=600, ucx_tls=tls, ucx_net_devices="lo")
    with caplog.at_level(logging.INFO), pair(config=config) as rig:
        for _ in range(2):
            complete(rig, (7, 1, 5))
        decode = rig.decode.thread
        assert LinkCounts.of(decode.stats().links) == LinkCounts(**{kind.value: 1})
        assert LinkCounts.of(rig.prefill.thread.stats().links) == LinkCounts(**{kind.value: 1})
        assert str(loaded_ucx()) in caplog.text
        rig.prefill.close()
        eventually(lambda: LinkCounts.of(decode.stats().links) == LinkCounts(), "the link is closed")
    told = [record for record in caplog.records if "travel by" in record.getMessage()]
    assert [record.levelno for record in told] == [level, level], "each side says it once"
    names = "KV blocks from prefill node p0", f"KV blocks to decode engine {rig.decode.boot_id.hex()[:8]}"
    for name in names:
        assert sum(record.getMessage().startswith(f"{name} travel by") for record in told) == 1
    assert all(lanes in record.getMessage() for record in told)
