"""What the benchmark and its prefill process say to each other: a JSON line each way."""

from __future__ import annotations

import msgspec

from pdserve.config import TransferConfig


class TransferSetup(msgspec.Struct, frozen=True):
    """What both engines are started with."""

    config: TransferConfig
    secret: bytes
    cache_dir: str
    """For compiled code."""
    device: str = "cpu"
    """Whose memory the caches are in, as torch names it."""


class Assignment(msgspec.Struct, frozen=True):
    """Which cache to serve, and how."""

    block_bytes: int
    blocks: int
    setup: TransferSetup
    chunk_blocks: int = 0
    """Blocks that are pushed together, as those of a prefill chunk are; 0 pushes all at once."""
    chunk_s: float = 0.0
    """From one such push to the next."""


class Serving(msgspec.Struct, frozen=True):
    """Where the engine can be reached, and which thread's CPU time is its own."""

    control: str
    boot_id: bytes
    thread: int
