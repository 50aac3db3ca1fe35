"""The messages between the benchmark and its prefill process: one JSON line each way."""

from __future__ import annotations

import msgspec

from pdserve.config import TransferConfig


class TransferSetup(msgspec.Struct, frozen=True):
    """The settings that both engines are started with."""

    config: TransferConfig
    secret: bytes
    cache_dir: str
    """The folder for compiled code."""
    device: str = "cpu"
    """The device whose memory holds the caches, by torch's name."""


class Assignment(msgspec.Struct, frozen=True):
    """The cache that the prefill engine serves, and how it pushes blocks."""

    block_bytes: int
    blocks: int
    setup: TransferSetup
    chunk_blocks: int = 0
    """The number of blocks that are pushed together, like those of a prefill chunk; 0 pushes all at once."""
    chunk_s: float = 0.0
    """The seconds from one such push to the next."""


class Serving(msgspec.Struct, frozen=True):
    """The addresses of the engine, and the thread whose CPU time is its own."""

    control: str
    boot_id: bytes
    thread: int
