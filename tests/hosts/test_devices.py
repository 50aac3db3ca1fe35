"""Tests which network devices KV blocks cross, between two hosts that two networks join."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdserve.config import TransferConfig
from pdserve.errors import ConfigError
from pdserve_kvtransfer.configuration import check_rank_devices, configured_ucx, devices_of
from tests.hosts.namespaces import Host, joined_twice

BYTES = 2**23


@pytest.fixture(scope="module")
def two(possible: None) -> Iterator[tuple[Host, Host]]:
    with joined_twice() as hosts:
        yield hosts


@pytest.mark.parametrize(
    ("devices", "rank", "rails", "least", "most"),
    [
        ("", 0, 1, 0.0, 0.1),
        ("", 0, 2, 0.2, 0.6),
        ("eth0/eth1", 0, 2, 0.0, 0.1),
        ("eth0/eth1", 1, 2, 0.9, 1.1),
    ],
    ids=["one rail", "two rails", "rank 0", "rank 1"],
)
def test_blocks_cross_the_devices_of_their_rank(
    two: tuple[Host, Host], devices: str, rank: int, rails: int, least: float, most: float
) -> None:
    """``least`` and ``most`` are of the bytes that cross the second device."""
    sender, receiver = two
    config = TransferConfig(ucx_tls="tcp", ucx_net_devices=devices, ucx_rails=rails)
    order = msgspec.json.encode((receiver.namespace, config, rank)).decode()
    # A program of its own sees the devices of its host in /sys, where UCX looks them up.
    argv = [*sender.prefix, sys.executable, "-m", "tests.hosts.test_devices", order]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, second = map(int, done.stdout.split())
    assert first + second >= BYTES
    # Without names, UCX takes the device that it likes best first.
    part = second if devices else min(first, second)
    assert least * BYTES <= part <= most * BYTES


def test_each_rank_has_its_devices_or_all_have_the_same() -> None:
    config = TransferConfig(ucx_net_devices="mlx5_0:1,mlx5_1:1/mlx5_2:1")
    assert [devices_of(config, rank) for rank in range(2)] == ["mlx5_0:1,mlx5_1:1", "mlx5_2:1"]
    check_rank_devices(config, 2)
    with pytest.raises(ConfigError, match="for 2 ranks, and this node has 4"):
        check_rank_devices(config, 4)
    one = TransferConfig(ucx_net_devices="^docker0")
    check_rank_devices(one, 4)
    assert devices_of(one, 3) == "^docker0"


def main(order: str) -> None:
    """Moves one message from this host to another one, and prints the bytes that each device of this one has sent."""
    namespace, config, rank = msgspec.json.decode(order, type=tuple[str, TransferConfig, int])
    there = Host("receiver", namespace, "")
    before = _sent()
    sender = configured_ucx(config, rank=rank).open_link(memoryview(bytearray(BYTES)))
    with there.inside():
        receiver = configured_ucx(config, rank=rank).open_link(memoryview(bytearray(BYTES)))
        receiver.connect([sender.address])
    sender.connect([receiver.address])
    sender.send([0], BYTES, [1])
    landed = 0
    while not landed:
        sender.progress()
        with there.inside():
            receiver.progress()
            receiver.receive([0] * len(receiver.arrivals()))
            landed = len(receiver.landed())
    sender.close()
    receiver.close()
    print(*(after - sent for after, sent in zip(_sent(), before, strict=True)))


def _sent() -> list[int]:
    rows = (line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    sent = {name.strip(): int(counts.split()[8]) for name, counts in rows}
    return [sent["eth0"], sent["eth1"]]


if __name__ == "__main__":
    main(sys.argv[1])
