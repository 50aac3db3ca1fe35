"""A prefill engine without a model, in a process of its own: what is probed where no peer is named.

``python -m pdserve.doctor.stand_in`` reads a ``StandIn`` as MessagePack from standard input, writes its control address
as one line, and ends when its standard input does.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec

from pdserve.config import TransferConfig
from pdserve.errors import TransferError
from pdserve.wire.discovery import Role
from pdserve.wire.ids import new_id
from pdserve.wire.transfer import EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
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
_LENGTH_BYTES = 4


class StandIn(msgspec.Struct, frozen=True):
    """What it is told."""

    secret: bytes
    transfer: TransferConfig
    block_bytes: int


@contextmanager
def standing_in(told: StandIn, environ: Mapping[str, str]) -> Iterator[str]:
    """Its control address, while the block runs. Raises TransferError if it does not come up."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "pdserve.doctor.stand_in"],
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with child:
        try:
            yield _address(child, told)
        finally:
            _end(child)


def _address(child: subprocess.Popen[bytes], told: StandIn) -> str:
    body = msgspec.msgpack.encode(told)
    try:
        if child.stdin is None or child.stdout is None:
            raise TransferError("the local probe has no pipes")
        child.stdin.write(len(body).to_bytes(_LENGTH_BYTES) + body)
        child.stdin.flush()
        came, _, _ = select.select([child.stdout], [], [], _START_S)
        address = child.stdout.readline().decode().strip() if came else ""
    except OSError as exc:
        raise TransferError(f"the local probe cannot be told what to do: {exc.strerror}") from exc
    if not address:
        raise TransferError("the local probe did not come up")
    return address


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is not None:
        # A child that ended before it read anything leaves bytes in the buffer, and closing would write them.
        with suppress(BrokenPipeError):
            child.stdin.close()
    try:
        child.wait(2 * _CLOSE_S)
    except subprocess.TimeoutExpired:
        child.kill()


def main() -> int:
    length = int.from_bytes(sys.stdin.buffer.read(_LENGTH_BYTES))
    told = msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=StandIn)
    thread = TransferThread(
        role=Role.PREFILL,
        boot_id=new_id(),
        secret=told.secret,
        spec=_SPEC,
        region=KvRegion(memoryview(bytearray(told.block_bytes)), told.block_bytes),
        config=told.transfer,
        wake=lambda: None,
    )
    try:
        print(thread.start(), flush=True)
        # Until whoever started it is done, or gone.
        os.read(sys.stdin.fileno(), 1)
    finally:
        thread.close(_CLOSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
