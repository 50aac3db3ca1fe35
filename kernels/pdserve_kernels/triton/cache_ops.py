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
    keys = tl.load(key + token * key_token_stride + head * key_head_stride + column, mask=inside)
    target = tiles + (slot // BLOCK_SIZE) * BLOCK_STRIDE + head * HEAD_STRIDE + (slot % BLOCK_SIZE) * HEAD_DIM + column
    tl.store(target, keys, mask=inside)
    if VALUES:
        values = tl.load(value + token * value_token_stride + head * value_head_stride + column, mask=inside)
        tl.store(target + BLOCK_SIZE * HEAD_DIM, values, mask=inside)


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
        triton.next_power_of_2(layout.kv_heads),
        triton.next_power_of_2(layout.head_dim),
    )


BLOCK_HEADS = 8
"""The heads of one token that one program takes."""


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
    value_cell = cell + (head - HEADS - KV_HEADS) * HEAD_STRIDE + BLOCK_SIZE * (2 * HALF)
    values = stored & (head >= HEADS + KV_HEADS)
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
