"""Memory that KV blocks live in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdserve_kvtransfer.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that this process can name but not read: a GPU's. Whoever makes it keeps them allocated."""

    address: int
    nbytes: int


Memory: TypeAlias = memoryview | SharedMemory | DeviceMemory
"""Host memory as one writable run of unsigned bytes, of which others may read the shared kind; or a device's."""


def host_bytes(memory: Memory) -> memoryview | None:
    """Not a copy. None if it is a device's."""
    match memory:
        case SharedMemory():
            return memory.bytes
        case DeviceMemory():
            return None
        case _:
            return memory
