"""A prefill engine without a model, in its own process. The doctor probes it where no peer is named.

``python -m pdserve.doctor.stand_in`` reads a ``StandIn`` as a line of JSON from standard input, writes its control
address as one line, and ends when its standard input does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import msgspec

from pdserve.config import TransferConfig
from pdserve.errors import TransferError
from pdserve.process import AnsweringProcess, ChildDied, python_program
from pdserve.wire.ids import new_id
from pdserve.wire.transfer import EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
from pdserve_kvtransfer.configuration import bound_to_loopback, configured_ucx, side_settings
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.thread import TransferThread

_SPEC = EngineSpec(
    protocol=PROTOCOL_VERSION,
    oldest_protocol=OLDEST_PROTOCOL,
    fingerprint="none",
    dtype="none",
    block_size=1,
    num_layers=1,
    kv_heads=1,
    head_dim=1,
    tp_size=1,
)
_START_S = 60.0
_CLOSE_S = 5.0


class StandIn(msgspec.Struct, frozen=True):
    """The order that a stand-in gets at its start."""

    secret: bytes
    transfer: TransferConfig
    block_bytes: int


@contextmanager
def standing_in(told: StandIn, environ: Mapping[str, str]) -> Iterator[str]:
    """Yields the control address of a stand-in that runs until the block ends. Raises TransferError if it fails."""
    try:
        child = AnsweringProcess(
            "the local probe", python_program("pdserve.doctor.stand_in"), environ, stderr=subprocess.DEVNULL
        )
    except OSError as exc:
        raise TransferError(f"the local probe cannot be started: {exc}") from exc
    try:
        try:
            address = child.ask(told, _START_S).decode().strip()
        except ChildDied as exc:
            raise TransferError("the local probe did not come up") from exc
        yield address
    finally:
        child.reap(2 * _CLOSE_S)


def main() -> int:
    told = msgspec.json.decode(sys.stdin.buffer.readline(), type=StandIn)
    thread = TransferThread(
        boot_id=new_id(),
        secret=told.secret,
        spec=_SPEC,
        region=KvRegion(memoryview(bytearray(told.block_bytes)), told.block_bytes),
        settings=side_settings(told.transfer),
        transport=partial(configured_ucx, told.transfer, loopback=bound_to_loopback(told.transfer)),
        wake=lambda: None,
    )
    try:
        print(thread.start(), flush=True)
        # This returns when the process that started this one closes the pipe or ends.
        os.read(sys.stdin.fileno(), 1)
    finally:
        thread.close(_CLOSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
