"""Tests that ids have one type everywhere and that each new id differs."""

from __future__ import annotations

import msgpack
import msgspec
import pytest

from pdserve.wire.ids import RequestId, TransferId, new_id


def test_new_ids_differ() -> None:
    assert len({new_id() for _ in range(1000)}) == 1000
    assert len(new_id()) == 16


def test_a_transfer_id_is_a_key() -> None:
    request, boot = new_id(), new_id()
    assert {TransferId(request, 0, boot): 1}[TransferId(request, 0, boot)] == 1
    assert TransferId(request, 0, boot) != TransferId(request, 1, boot)


def test_a_text_in_place_of_bytes_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="bytes"):
        msgspec.msgpack.decode(msgpack.packb(["x" * 16, 0, b"y" * 16]), type=TransferId)


@pytest.mark.parametrize("attempt", [-1, 1001, "0"])
def test_an_attempt_out_of_range_is_refused(attempt: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgpack.packb([b"x" * 16, attempt, b"y" * 16]), type=TransferId)


@pytest.mark.parametrize("label", ["", "chat-1", "!~" * 64])
def test_a_label_of_visible_characters_is_taken(label: str) -> None:
    assert msgspec.msgpack.decode(msgpack.packb(label), type=RequestId) == label


@pytest.mark.parametrize("label", ["two words", "a\n", "a\nforged line", "\x1b[2J", "é", "x" * 129])
def test_a_label_that_could_forge_a_log_line_is_refused(label: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgpack.packb(label), type=RequestId)
