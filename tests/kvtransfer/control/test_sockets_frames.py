"""Tests control frames as others can read them, and that this package survives wrong ones."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import struct
from typing import cast

import msgpack
import pytest

from pdserve.control.frame import Purpose, Sealer
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.transfer import Failed, Hello, Ping, Refused, ToPrefill, Welcome
from pdserve_kvtransfer.control.sockets import FrameOpener, Spoilt
from pdserve_kvtransfer.events import TransferStats
from tests.eventually import eventually
from tests.kvtransfer.fakes import FakeDecode
from tests.kvtransfer.rig import SECRET, SPEC, engine


def test_any_messagepack_library_reads_a_frame() -> None:
    boot_id = new_id()
    transfer = TransferId(new_id(), 3, boot_id)
    frame = Sealer(SECRET, Purpose.TRANSFER, boot_id, clock=lambda: 12.5).seal(Failed(transfer, "why"))
    version, sender, counter, sent_ms, body, mac = msgpack.unpackb(frame)
    assert (version, sender, counter, sent_ms) == (1, boot_id, 1, 12_500)
    assert msgpack.unpackb(body) == {
        "kind": "failed",
        "transfer_id": [transfer.request, 3, boot_id],
        "reason": "why",
    }
    signed = b"transfer\0" + struct.pack(">B16sQQ", version, sender, counter, sent_ms) + body
    assert mac == hmac.digest(SECRET, signed, hashlib.sha256)


def test_any_messagepack_library_reads_a_handshake() -> None:
    boot_id = new_id()
    frame = Sealer(SECRET, Purpose.TRANSFER, boot_id).seal(Hello(boot_id, SPEC, [b"\x00\xff"]))
    hello = msgpack.unpackb(msgpack.unpackb(frame)[4])
    assert hello["rank_addresses"] == [b"\x00\xff"]
    assert list(hello["spec"]) == [
        "protocol",
        "fingerprint",
        "dtype",
        "block_size",
        "num_layers",
        "kv_heads",
        "head_dim",
        "tp_size",
        "oldest_protocol",
    ]


def test_bad_frames_are_counted_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    stats = TransferStats()
    opener: FrameOpener[ToPrefill] = FrameOpener(SECRET, cast("type[ToPrefill]", ToPrefill), stats, new_id())
    with caplog.at_level(logging.WARNING):
        for now in (0.0, 1.0, 4.9, 5.0):
            assert isinstance(opener.open(b"nonsense", now), Spoilt)
    assert stats.frames_dropped == 4
    assert len(caplog.records) == 2


def test_rubbish_on_the_control_channel_changes_nothing() -> None:
    boot_id = new_id()
    foreign = Sealer(b"another secret", Purpose.TRANSFER, boot_id)
    other_channel = Sealer(SECRET, Purpose.TICKET, boot_id)
    own = Sealer(SECRET, Purpose.TRANSFER, boot_id)
    hello = Hello(boot_id, SPEC, [b"not a UCX address: it would abort the process"])
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        replayed = decode.seal(Ping(decode.boot_id))
        rubbish = [
            b"",
            os.urandom(64),
            foreign.seal(hello),
            other_channel.seal(hello),
            own.seal(Welcome(boot_id, SPEC, [])),
            replayed,
            replayed,
        ]
        for frame in rubbish:
            decode.socket.send(frame)
        decode.socket.send_multipart([b"two", b"parts"])
        eventually(lambda: prefill.thread.stats().frames_dropped == len(rubbish))
        assert decode.next(Refused).field == "handshake"  # The ping that came first was authentic.
        decode.greet()
        assert prefill.thread.stats().handshakes == 1
