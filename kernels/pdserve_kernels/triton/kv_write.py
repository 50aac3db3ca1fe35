"""Store new keys and values in the paged cache: one program a token, all heads of both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve_kernels.layout import KvLayout


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
    values = tl.load(value + token * value_token_stride + head * value_head_stride + column, mask=inside)
    target = tiles + (slot // BLOCK_SIZE) * BLOCK_STRIDE + head * HEAD_STRIDE + (slot % BLOCK_SIZE) * HEAD_DIM + column
    tl.store(target, keys, mask=inside)
    tl.store(target + BLOCK_SIZE * HEAD_DIM, values, mask=inside)


def kv_write(
    cache: torch.Tensor, layout: KvLayout, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """``reference.kv_write``; the last dimension of ``key`` and ``value`` must be dense.

    Slots must differ, but for those of padding, -1, where nothing is stored.
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
        triton.next_power_of_2(layout.kv_heads),
        triton.next_power_of_2(layout.head_dim),
    )
