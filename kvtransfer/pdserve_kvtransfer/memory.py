"""Memory that KV blocks live in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that this process can name but not read: a GPU's. Whoever makes it keeps them allocated."""

    address: int
    nbytes: int


Memory: TypeAlias = memoryview | DeviceMemory
"""Host memory as one writable run of unsigned bytes, or a device's."""
