"""The KV cache as transfers see it: numbered blocks of bytes in host memory or in a device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pdserve_kvtransfer.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU, which this process can address but not read. Its maker keeps them allocated."""

    address: int
    nbytes: int


Memory: TypeAlias = memoryview | SharedMemory | DeviceMemory
"""One writable run of unsigned bytes in host memory (other processes may read the shared kind) or a device's memory."""


def host_bytes(memory: Memory) -> memoryview | None:
    """Returns the bytes themselves, not a copy, or None if the memory is a device's."""
    match memory:
        case SharedMemory():
            return memory.bytes
        case DeviceMemory():
            return None
        case _:
            return memory


class KvRegion:
    """``num_blocks`` blocks of ``block_bytes`` bytes each, back to back in writable memory.

    Raises ValueError if ``memory`` is not writable contiguous bytes, or not a whole number of blocks.
    """

    def __init__(self, memory: Memory, block_bytes: int) -> None:
        own = host_bytes(memory)
        if own is not None and (own.readonly or not own.c_contiguous or own.format != "B" or own.ndim != 1):
            raise ValueError("a KV region is one writable, contiguous run of unsigned bytes")
        if block_bytes < 1 or memory.nbytes == 0 or memory.nbytes % block_bytes:
            raise ValueError(f"{memory.nbytes} bytes are not a whole number of blocks of {block_bytes}")
        self.memory = memory
        self._bytes = own
        self.block_bytes = block_bytes
        self.num_blocks = memory.nbytes // block_bytes

    @property
    def unshared_memory(self) -> Memory:
        """The same memory without the means to let other processes map it."""
        return self.memory if self._bytes is None else self._bytes

    @property
    def readable(self) -> bool:
        """Whether this process can read blocks, and so can check them."""
        return self._bytes is not None

    def bytes_at(self, place: int, length: int) -> memoryview:
        """Returns the bytes themselves, not a copy. Raises ValueError if the memory is a device's."""
        if self._bytes is None:
            raise ValueError("the memory of a device cannot be read")
        return self._bytes[place : place + length]

    def block(self, block_id: int) -> memoryview:
        """Returns the memory of one block, not a copy. Raises ValueError if there is no such block."""
        self.check(block_id)
        return self.bytes_at(block_id * self.block_bytes, self.block_bytes)

    def place(self, block_id: int, first: int) -> int:
        """Returns where byte ``first`` of a block is, counted from the start of ``memory``. Checks nothing."""
        return block_id * self.block_bytes + first

    def check(self, *block_ids: int) -> None:
        """Raises ValueError unless every block exists."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"no block {block_id} in a region of {self.num_blocks}")
