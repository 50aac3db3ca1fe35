"""Tests that the mock engine gets the credit that clients report, takes the last number, and blocks no client."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.stream.credit import credit_of, credit_to


def test_the_last_number_counts(tmp_path: Path) -> None:
    fifo = str(tmp_path / "credit")
    os.mkfifo(fifo)
    with credit_of(fifo) as reader, credit_to(fifo) as writer:
        assert reader is not None
        assert writer is not None
        assert reader.read() == 0
        for tokens in (3, 3, 8):
            writer.tell(tokens)
        assert reader.read() == 8
        assert reader.read() == 8


def test_a_full_fifo_does_not_hold_up_the_clients(tmp_path: Path) -> None:
    fifo = str(tmp_path / "credit")
    os.mkfifo(fifo)
    with credit_of(fifo) as reader, credit_to(fifo) as writer:
        assert reader is not None
        assert writer is not None
        for tokens in range(1, 20_000):
            writer.tell(tokens)
        before = reader.read()
        assert 0 < before < 20_000
        while (now := reader.read()) > before:
            before = now
        writer.tell(20_000)
        assert reader.read() == 20_000


def test_nobody_asked() -> None:
    with credit_of("") as reader, credit_to("") as writer:
        assert reader is None
        assert writer is None
