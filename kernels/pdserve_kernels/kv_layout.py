"""Says where a token's key and value live in the KV cache tensor, and where a request's state does.

Each rank has one tensor for each group of layers. That of keys and values is ``[num_blocks, kv_heads, num_layers, 2,
block_size, head_dim]``. A block is one contiguous range of bytes over all layers (one message on the wire), and a head
is a contiguous part of it. The tile of one block, head, layer, and key or value, ``[block_size, head_dim]``, is
contiguous, too: it is one *row* of the tile view. Where a value is a part of its key, as in latent attention, there
are no tiles of values, and the dimension of 2 is one of 1.

A cache in FP8 is bytes, ``[num_blocks, kv_heads, num_layers, 2, block_size * (head_dim + 1)]``. A tile has the numbers
of its tokens (e4m3, ``[block_size, head_dim]``) and then one byte for each token: the exponent of the power of two that
its numbers are multiplied by, plus 127 (``reference.quantised``). A scale belongs to one token, head and layer, because
what is stored of a token must not depend on the tokens that share its block: they come in other steps on other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of one rank's KV cache, without the number of blocks."""

    kv_heads: int
    num_layers: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    """That of queries and results, and of keys and values unless these are stored in FP8."""
    shared_channels: int = 0
    """The first so many channels of a key are its value, and only keys are stored; 0 if values are stored, too."""
    fp8: bool = False
    """Whether keys and values are stored in FP8, each with its exponent."""

    @property
    def tiles_a_layer(self) -> int:
        """The tiles that a layer has of one head of a block: of keys and of values, or of keys alone."""
        return 1 if self.shared_channels else 2

    @property
    def value_dim(self) -> int:
        """The channels of a value."""
        return self.shared_channels or self.head_dim

    @property
    def block_bytes(self) -> int:
        """The bytes of one block over all layers and heads."""
        return self.kv_heads * self.num_layers * self.tiles_a_layer * self.tile_elements * self.element.itemsize

    @property
    def element(self) -> torch.dtype:
        """The dtype of the cache's tensor."""
        return torch.uint8 if self.fp8 else self.dtype

    @property
    def tile_elements(self) -> int:
        """The elements of one tile of the cache's tensor."""
        return self.block_size * (self.head_dim + self.fp8)

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Returns a zeroed cache of ``num_blocks`` blocks."""
        return torch.zeros(self._shape(num_blocks), dtype=self.element, device=device)

    def over(self, memory: memoryview) -> torch.Tensor:
        """Returns a cache in ``memory``, of as many blocks as it holds."""
        return self.view(torch.frombuffer(memory, dtype=torch.uint8), memory.nbytes // self.block_bytes)

    def view(self, memory: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Returns the cache of ``num_blocks`` in ``memory``, uint8 ``[num_blocks * block_bytes]``."""
        return memory.view(self.element).view(self._shape(num_blocks))

    def tiles(self, cache: torch.Tensor) -> torch.Tensor:
        """Returns the cache as ``[rows, tile_elements]``: a row for each (block, head, layer, key or value)."""
        return cache.view(-1, self.tile_elements)

    def tokens(self, cache: torch.Tensor) -> torch.Tensor:
        """Returns the cache, not in FP8, as ``[rows * block_size, head_dim]``: a row for each token of each tile."""
        return cache.view(-1, self.head_dim)

    def split(self, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the numbers ``[..., block_size, head_dim]`` and exponents ``[..., block_size]`` of tiles in FP8.

        ``tiles`` is uint8 ``[..., tile_elements]``. Both results are views.
        """
        end = self.block_size * self.head_dim
        numbers = tiles[..., :end].view(*tiles.shape[:-1], self.block_size, self.head_dim)
        return numbers, tiles[..., end:]

    def tile_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Returns, as ``[kv_heads, ...]``, the rows of layer 0's key tiles of all heads of ``blocks``, ``[...]``.

        Add ``tiles_a_layer - 1`` for the value tile, and ``tiles_a_layer * layer`` for another layer.
        """
        heads = torch.arange(self.kv_heads, device=blocks.device).view(-1, *([1] * blocks.dim()))
        return (blocks.unsqueeze(0) * self.kv_heads + heads) * (self.tiles_a_layer * self.num_layers)

    def _shape(self, num_blocks: int) -> tuple[int, ...]:
        tile = (self.tile_elements,) if self.fp8 else (self.block_size, self.head_dim)
        return (num_blocks, self.kv_heads, self.num_layers, self.tiles_a_layer, *tile)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The shape of one rank's states, fp32 ``[num_blocks, heads, num_layers, numbers]``: a head is contiguous."""

    heads: int
    num_layers: int
    numbers: int

    @property
    def block_bytes(self) -> int:
        """The bytes of one state over all layers and heads."""
        return self.heads * self.num_layers * self.numbers * torch.float32.itemsize

    def view(self, memory: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Returns the states of ``num_blocks`` in ``memory``, uint8 ``[num_blocks * block_bytes]``."""
        return memory.view(torch.float32).view(num_blocks, self.heads, self.num_layers, self.numbers)
