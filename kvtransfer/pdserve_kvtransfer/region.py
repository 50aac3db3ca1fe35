"""The KV cache as transfers see it: numbered blocks of bytes."""

from __future__ import annotations


class KvRegion:
    """``num_blocks`` blocks of ``block_bytes`` bytes each, back to back in writable host memory.

    Raises ValueError if ``buffer`` is not writable contiguous bytes, or not a whole number of blocks.
    """

    def __init__(self, buffer: memoryview, block_bytes: int) -> None:
        if buffer.readonly or not buffer.c_contiguous or buffer.format != "B" or buffer.ndim != 1:
            raise ValueError("a KV region is one writable, contiguous run of unsigned bytes")
        if block_bytes < 1 or buffer.nbytes == 0 or buffer.nbytes % block_bytes:
            raise ValueError(f"{buffer.nbytes} bytes are not a whole number of blocks of {block_bytes}")
        self.memory = buffer
        self.block_bytes = block_bytes
        self.num_blocks = buffer.nbytes // block_bytes

    def block(self, block_id: int) -> memoryview:
        """The memory of one block, not a copy. Raises ValueError if there is no such block."""
        self.check(block_id)
        start = block_id * self.block_bytes
        return self.memory[start : start + self.block_bytes]

    def place(self, block_id: int, first: int) -> int:
        """Where byte ``first`` of a block is, counted from the start of ``memory``; unchecked."""
        return block_id * self.block_bytes + first

    def check(self, *block_ids: int) -> None:
        """Raises ValueError unless every block exists."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"no block {block_id} in a region of {self.num_blocks}")
