"""Writes to the paged KV cache, and copies its blocks out and back.

``kv_write`` stores new keys and values, with one program for all heads of a token. ``store_projected`` goes from a
layer's projection to its query and its stored keys and values in one pass: heads are normalised if the model does so,
then rotated, and keys and values are stored at once. Separate operations would take up to five launches a layer, each
of which reads what the one before wrote. ``gather_blocks`` and ``scatter_blocks`` copy blocks to one contiguous buffer
and back, for transfers that pass through the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve_kernels.contract import HeadNorms
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton.fp8 import largest_bits, quantised, stored_exponent


@triton.jit
def _store_scaled(tile, offset, column, x, inside, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Stores rows of heads in FP8. ``x`` is ``[heads, columns]``, 0 where it is not ``inside``."""
    wide = x.to(tl.float32)
    exponent = stored_exponent(tl.max(largest_bits(wide), 1))[:, None]
    tl.store(tile + offset * HEAD_DIM + column, quantised(wide, exponent), mask=inside)
    target = tile + BLOCK_SIZE * HEAD_DIM + offset + column
    tl.store(target, exponent.to(tl.uint8) + (column * 0).to(tl.uint8), mask=inside & (column == 0))


@triton.jit
def _kv_write_kernel(
    tiles,
    slots,
    key,
    value,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (head < KV_HEADS) & (column < HEAD_DIM)
    keys = tl.load(key + token * key_token_stride + head * key_head_stride + column, mask=inside, other=0.0)
    tile = tiles + (slot // BLOCK_SIZE) * BLOCK_STRIDE + head * HEAD_STRIDE
    offset = slot % BLOCK_SIZE
    if FP8:
        _store_scaled(tile, offset, column, keys, inside, BLOCK_SIZE, HEAD_DIM)
    else:
        tl.store(tile + offset * HEAD_DIM + column, keys, mask=inside)
    if VALUES:
        values = tl.load(value + token * value_token_stride + head * value_head_stride + column, mask=inside, other=0.0)
        if FP8:
            tile += BLOCK_SIZE * (HEAD_DIM + 1)
            _store_scaled(tile, offset, column, values, inside, BLOCK_SIZE, HEAD_DIM)
        else:
            tl.store(tile + BLOCK_SIZE * HEAD_DIM + offset * HEAD_DIM + column, values, mask=inside)


def kv_write(
    cache: torch.Tensor, layout: KvLayout, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Computes ``reference.kv_write``. The last dimension of ``key`` and ``value`` must be dense.

    All slots must differ, except those of padding (-1), for which nothing is stored.
    """
    if not len(slots):
        return
    tiles = cache[:, :, layer]
    _kv_write_kernel[(len(slots),)](
        tiles,
        slots,
        key,
        value,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        layout.kv_heads,
        tiles.stride(0),
        tiles.stride(1),
        layout.block_size,
        layout.head_dim,
        not layout.shared_channels,
        layout.fp8,
        triton.next_power_of_2(layout.kv_heads),
        triton.next_power_of_2(layout.head_dim),
    )


BLOCK_HEADS = 8
"""The heads of one token that one program takes."""


@triton.jit
def _store_halves(cell, to_exponent, column, first, second, mask, HALF: tl.constexpr):
    """Stores rows of heads in FP8, of which ``first`` and ``second`` are the halves, fp32 ``[heads, columns]``."""
    largest = tl.maximum(tl.max(largest_bits(first), 1), tl.max(largest_bits(second), 1))
    exponent = stored_exponent(largest)[:, None]
    tl.store(cell, quantised(first, exponent), mask=mask)
    tl.store(cell + HALF, quantised(second, exponent), mask=mask)
    tl.store(cell + to_exponent, exponent.to(tl.uint8) + (column * 0).to(tl.uint8), mask=mask & (column == 0))


@triton.jit
def _projection_kernel(
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    slots,
    query,
    tiles,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (column < HALF)
    source = qkv + token * token_stride + head * (2 * HALF) + column
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)

    slot = tl.load(slots + token).to(tl.int64)
    stored = inside & (tl.zeros_like(head) + slot >= 0)
    cell = tiles + (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * (2 * HALF) + column
    value_cell = cell + (head - HEADS - KV_HEADS) * HEAD_STRIDE + BLOCK_SIZE * (2 * HALF + FP8)
    values = stored & (head >= HEADS + KV_HEADS)
    # An exponent lies as far behind its tile's numbers as the token is, and that cell is where the row's numbers begin.
    to_exponent = BLOCK_SIZE * (2 * HALF) + (slot % BLOCK_SIZE) * (1 - 2 * HALF)
    if FP8:
        _store_halves(value_cell, to_exponent, column, first.to(tl.float32), second.to(tl.float32), values, HALF)
    else:
        tl.store(value_cell, first, mask=values)
        tl.store(value_cell + HALF, second, mask=values)

    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORMS:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        is_query = inside & (head < HEADS)
        is_key = inside & (head >= HEADS)
        at = tl.zeros_like(head) + column
        gain = tl.load(query_norm + at, mask=is_query, other=0.0) + tl.load(key_norm + at, mask=is_key, other=0.0)
        at += HALF
        gain_second = tl.load(query_norm + at, mask=is_query, other=0.0)
        gain_second += tl.load(key_norm + at, mask=is_key, other=0.0)
        # The values are rounded in between, as separate operations round them.
        first = (first * scale * gain.to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
        second = (second * scale * gain_second.to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
    cosine = tl.load(cos + token * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    rotated_first = (first * cosine - second * sine).to(qkv.dtype.element_ty)
    rotated_second = (second * cosine + first * sine).to(qkv.dtype.element_ty)
    target = query + (token * HEADS + head) * (2 * HALF) + column
    tl.store(target, rotated_first, mask=inside & (head < HEADS))
    tl.store(target + HALF, rotated_second, mask=inside & (head < HEADS))
    key_cell = cell + (head - HEADS) * HEAD_STRIDE
    keys = stored & (head >= HEADS) & (head < HEADS + KV_HEADS)
    if FP8:
        _store_halves(
            key_cell, to_exponent, column, rotated_first.to(tl.float32), rotated_second.to(tl.float32), keys, HALF
        )
    else:
        tl.store(key_cell, rotated_first, mask=keys)
        tl.store(key_cell + HALF, rotated_second, mask=keys)


def store_projected(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    cache: torch.Tensor,
    layout: KvLayout,
    layer: int,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Computes ``reference.projected``, and stores keys and values as ``kv_write`` does.

    The heads of ``qkv`` are dense. Returns the query, ``[tokens, heads, head_dim]``.
    """
    tokens, all_heads, head_dim = qkv.shape
    heads = all_heads - 2 * layout.kv_heads
    query = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        half, tiles = head_dim // 2, cache[:, :, layer]
        _projection_kernel[(tokens, triton.cdiv(all_heads, BLOCK_HEADS))](
            qkv,
            cos.contiguous(),
            sin.contiguous(),
            qkv if norms is None else norms.query,
            qkv if norms is None else norms.key,
            slots,
            query,
            tiles,
            qkv.stride(0),
            0.0 if norms is None else norms.eps,
            heads,
            layout.kv_heads,
            half,
            norms is not None,
            layout.fp8,
            layout.block_size,
            tiles.stride(0),
            tiles.stride(1),
            BLOCK_HEADS,
            triton.next_power_of_2(half),
        )
    return query


COPY_CHUNK = 4096
"""The elements that one program copies."""


@triton.jit
def _gather_kernel(cache, blocks, buffer, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + index).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < ELEMENTS
    tl.store(buffer + index * ELEMENTS + column, tl.load(cache + block * ELEMENTS + column, mask=inside), mask=inside)


@triton.jit
def _scatter_kernel(cache, blocks, buffer, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + index).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < ELEMENTS
    tl.store(cache + block * ELEMENTS + column, tl.load(buffer + index * ELEMENTS + column, mask=inside), mask=inside)


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copies ``blocks`` of the cache to the first ``len(blocks)`` blocks of ``buffer``, which is contiguous."""
    if len(blocks):
        _gather_kernel[_copy_grid(cache, blocks)](cache, blocks, buffer, cache[0].numel(), COPY_CHUNK)


def scatter_blocks(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copies the first ``len(blocks)`` blocks of ``buffer``, which is contiguous, to ``blocks`` of the cache."""
    if len(blocks):
        _scatter_kernel[_copy_grid(cache, blocks)](cache, blocks, buffer, cache[0].numel(), COPY_CHUNK)


def _copy_grid(cache: torch.Tensor, blocks: torch.Tensor) -> tuple[int, int]:
    return len(blocks), triton.cdiv(cache[0].numel(), COPY_CHUNK)
