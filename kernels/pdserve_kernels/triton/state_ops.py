"""Computes layers that keep a state: short convolutions, the gated delta rule and the scans of Mamba and Mamba 2.

A program has one run of tokens, and some channels of one head. It goes through the tokens in turn, so that a run of
many leaves what runs of one token each would. All about runs is read on the device, so that a recorded step may be
replayed with others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve_kernels.contract import StateRuns, check_states

TOKENS_AT_ONCE = 32
"""The tokens of a long run that a program convolves together."""
VALUES_AT_ONCE = 32
"""The columns of a matrix that a program has in registers."""


@triton.jit
def _seen(x, state, at, column, inside, source, head_of_x, token_stride, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Loads inputs of tokens ``at``, counted from the run's first: those before it are in the state."""
    of_run = tl.load(x + at * token_stride + head_of_x + column, mask=inside & (at >= 0), other=0.0).to(tl.float32)
    kept = inside & (at < 0) & (at >= tl.where(source >= 0, 1 - WIDTH, 0))
    return of_run + tl.load(state + (at + WIDTH - 1) * CHANNELS + column, mask=kept, other=0.0)


@triton.jit
def _causal_conv_kernel(
    x,
    weight,
    bias,
    out,
    states,
    starts,
    sources,
    destinations,
    kept,
    block_stride,
    head_stride,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    SILU: tl.constexpr,
):
    run, head = tl.program_id(0), tl.program_id(1)
    column = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK))[None, :]
    first, end = tl.load(starts + run).to(tl.int64), tl.load(starts + run + 1).to(tl.int64)
    source, destination = tl.load(sources + run).to(tl.int64), tl.load(destinations + run).to(tl.int64)
    inside = column < CHANNELS
    here = x + first * HEADS * CHANNELS
    own = states + head.to(tl.int64) * head_stride
    before = own + source * block_stride
    count = end - first
    for begin in range(0, count, TOKENS):
        token = (begin + tl.arange(0, TOKENS))[:, None].to(tl.int64)
        valid = inside & (token < count)
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for tap in tl.static_range(WIDTH):
            factor = tl.load(weight + (tap * HEADS + head) * CHANNELS + column, mask=inside, other=0.0).to(tl.float32)
            at = token + (tap - WIDTH + 1)
            total += factor * _seen(
                here, before, at, column, valid, source, head * CHANNELS, HEADS * CHANNELS, WIDTH, CHANNELS
            )
        if bias is not None:
            total += tl.load(bias + head * CHANNELS + column, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        total = tl.where(destination >= 0, total, 0.0)
        to = out + ((first + token) * HEADS + head) * CHANNELS + column
        tl.store(to, total.to(out.dtype.element_ty), mask=valid)
        if kept is not None:
            block = tl.load(kept + first + token, mask=token < count, other=-1).to(tl.int64)
            for tap in tl.static_range(WIDTH - 1):
                at = token + (tap - WIDTH + 2)
                held = _seen(
                    here, before, at, column, valid, source, head * CHANNELS, HEADS * CHANNELS, WIDTH, CHANNELS
                )
                tl.store(own + block * block_stride + tap * CHANNELS + column, held, mask=valid & (block >= 0))
    place = tl.arange(0, BLOCK_WIDTH)[:, None].to(tl.int64)
    stored = inside & (place < tl.where(destination >= 0, WIDTH - 1, 0))
    left = _seen(
        here,
        before,
        count - WIDTH + 1 + place,
        column,
        stored,
        source,
        head * CHANNELS,
        HEADS * CHANNELS,
        WIDTH,
        CHANNELS,
    )
    # The state that is written may be the one that was read.
    tl.debug_barrier()
    tl.store(own + destination * block_stride + place * CHANNELS + column, left, mask=stored)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    runs: StateRuns,
    *,
    silu: bool,
) -> torch.Tensor:
    """Computes ``reference.causal_conv``."""
    _, heads, channels = x.shape
    width = len(weight)
    check_states(state, (heads, width - 1, channels))
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        block = min(128, triton.next_power_of_2(channels))
        _causal_conv_kernel[len(runs.sources), heads, triton.cdiv(channels, block)](
            x,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            out,
            state,
            runs.starts,
            runs.sources,
            runs.destinations,
            runs.kept,
            state.stride(0),
            state.stride(1),
            heads,
            channels,
            width,
            triton.next_power_of_2(width),
            block,
            1 if runs.single else TOKENS_AT_ONCE,
            silu,
        )
    return out


@triton.jit
def _gated_delta_rule_kernel(
    qkv,
    decay,
    beta,
    out,
    states,
    starts,
    sources,
    destinations,
    kept,
    block_stride,
    head_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run, number = tl.program_id(0), tl.program_id(1)
    head, member = number // GROUP, number % GROUP
    row, column = tl.arange(0, BLOCK_KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.load(starts + run).to(tl.int64), tl.load(starts + run + 1).to(tl.int64)
    source, destination = tl.load(sources + run).to(tl.int64), tl.load(destinations + run).to(tl.int64)
    of_key, of_value = row < KEYS, column < VALUES
    begun = (row < tl.where(source >= 0, KEYS, 0))[:, None] & of_value[None, :]
    stored = (row < tl.where(destination >= 0, KEYS, 0))[:, None] & of_value[None, :]
    own = states + head.to(tl.int64) * head_stride + (member * KEYS + row[:, None]) * VALUES + column[None, :]
    matrix = tl.load(own + source * block_stride, mask=begun, other=0.0)
    for token in range(first, end):
        at = qkv + (token * HEADS + head) * (2 * KEYS + GROUP * VALUES)
        query = tl.load(at + row, mask=of_key, other=0.0).to(tl.float32)
        key = tl.load(at + KEYS + row, mask=of_key, other=0.0).to(tl.float32)
        value = tl.load(at + 2 * KEYS + member * VALUES + column, mask=of_value, other=0.0).to(tl.float32)
        query *= scale * tl.rsqrt(tl.sum(query * query, 0) + 1e-6)
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        scalar = (token * HEADS + head) * GROUP + member
        if BY_CHANNEL:
            matrix *= tl.exp(tl.load(decay + scalar * KEYS + row, mask=of_key, other=0.0))[:, None]
        else:
            matrix *= tl.exp(tl.load(decay + scalar))
        change = (value - tl.sum(matrix * key[:, None], 0)) * tl.load(beta + scalar)
        matrix += key[:, None] * change[None, :]
        found = tl.where(destination >= 0, tl.sum(matrix * query[:, None], 0), 0.0)
        tl.store(out + scalar * VALUES + column, found.to(out.dtype.element_ty), mask=of_value)
        if kept is not None:
            block = tl.load(kept + token).to(tl.int64)
            wanted = (row < tl.where(block >= 0, KEYS, 0))[:, None] & of_value[None, :]
            tl.store(own + block * block_stride, matrix, mask=wanted)
    # The state that is written may be the one that was read.
    tl.debug_barrier()
    tl.store(own + destination * block_stride, matrix, mask=stored)


def gated_delta_rule(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, runs: StateRuns
) -> torch.Tensor:
    """Computes ``reference.gated_delta_rule``."""
    tokens, heads, _ = qkv.shape
    group, keys, values = state.shape[2:]
    check_states(state, (heads, group, keys, values))
    out = torch.empty((tokens, heads, group, values), dtype=qkv.dtype, device=qkv.device)
    if out.numel():
        block = min(VALUES_AT_ONCE, triton.next_power_of_2(values))
        _gated_delta_rule_kernel[len(runs.sources), heads * group, triton.cdiv(values, block)](
            qkv.contiguous(),
            decay.contiguous(),
            beta.contiguous(),
            out,
            state,
            runs.starts,
            runs.sources,
            runs.destinations,
            runs.kept,
            state.stride(0),
            state.stride(1),
            keys**-0.5,
            heads,
            group,
            keys,
            values,
            decay.dim() == 4,
            triton.next_power_of_2(keys),
            block,
        )
    return out


@triton.jit
def _scan_kernel(
    xbc,
    steps,
    rate,
    skip,
    states,
    starts,
    sources,
    destinations,
    kept,
    out,
    block_stride,
    group_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Computes some rows of one head's matrix in one run, token by token."""
    run = tl.program_id(0)
    group = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    row = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    column = tl.arange(0, BLOCK_SIZE)
    inside = row < HEAD_DIM
    begin = tl.load(starts + run)
    end = tl.load(starts + run + 1)
    source = tl.load(sources + run).to(tl.int64)
    destination = tl.load(destinations + run).to(tl.int64)
    of_size = (column < SIZE)[None, :]
    begun = (row < tl.where(source >= 0, HEAD_DIM, 0))[:, None] & of_size
    stored = (row < tl.where(destination >= 0, HEAD_DIM, 0))[:, None] & of_size
    place = group * group_stride + (head * HEAD_DIM + row[:, None]) * SIZE + column[None, :]
    matrix = tl.load(states + source * block_stride + place, mask=begun, other=0.0)
    rate_here = tl.load(rate + group * HEADS + head)
    skip_here = tl.load(skip + group * HEADS + head)
    width = HEADS * HEAD_DIM + 2 * SIZE
    for at in range(begin, end):
        token = tl.cast(at, tl.int64)
        base = xbc + (token * GROUPS + group) * width
        x = tl.load(base + head * HEAD_DIM + row, mask=inside, other=0.0).to(tl.float32)
        write = tl.load(base + HEADS * HEAD_DIM + column, mask=column < SIZE, other=0.0).to(tl.float32)
        read = tl.load(base + HEADS * HEAD_DIM + SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
        step = tl.load(steps + (token * GROUPS + group) * HEADS + head)
        matrix = matrix * tl.exp(step * rate_here) + (step * x)[:, None] * write[None, :]
        found = tl.where(destination >= 0, tl.sum(matrix * read[None, :], 1) + skip_here * x, 0.0)
        target = out + ((token * GROUPS + group) * HEADS + head) * HEAD_DIM + row
        tl.store(target, found.to(out.dtype.element_ty), mask=inside)
        if kept is not None:
            block = tl.load(kept + token).to(tl.int64)
            wanted = (row < tl.where(block >= 0, HEAD_DIM, 0))[:, None] & of_size
            tl.store(states + block * block_stride + place, matrix, mask=wanted)
    # The state that is written may be the one that was read.
    tl.debug_barrier()
    tl.store(states + destination * block_stride + place, matrix, mask=stored)


def mamba2_scan(
    xbc: torch.Tensor,
    steps: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    """Computes ``reference.mamba2_scan``."""
    tokens, groups, _ = xbc.shape
    heads, head_dim, size = state.shape[2:]
    xbc, steps = xbc.contiguous(), steps.contiguous()
    out = xbc.new_empty((tokens, groups, heads, head_dim))
    rows = min(32, triton.next_power_of_2(head_dim))
    _scan_kernel[(len(runs.sources), groups * heads, triton.cdiv(head_dim, rows))](
        xbc,
        steps,
        rate,
        skip,
        state,
        runs.starts,
        runs.sources,
        runs.destinations,
        runs.kept,
        out,
        state.stride(0),
        state.stride(1),
        groups,
        heads,
        head_dim,
        size,
        rows,
        triton.next_power_of_2(size),
    )
    return out


@triton.jit
def _channel_scan_kernel(
    x,
    steps,
    write,
    read,
    rate,
    skip,
    states,
    starts,
    sources,
    destinations,
    kept,
    out,
    block_stride,
    head_stride,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Computes some channels of one head in one run, token by token."""
    run = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    column = tl.arange(0, BLOCK_SIZE)
    inside = row < CHANNELS
    begin = tl.load(starts + run)
    end = tl.load(starts + run + 1)
    source = tl.load(sources + run).to(tl.int64)
    destination = tl.load(destinations + run).to(tl.int64)
    of_size = (column < SIZE)[None, :]
    begun = (row < tl.where(source >= 0, CHANNELS, 0))[:, None] & of_size
    stored = (row < tl.where(destination >= 0, CHANNELS, 0))[:, None] & of_size
    place = head * head_stride + row[:, None] * SIZE + column[None, :]
    numbers = tl.load(states + source * block_stride + place, mask=begun, other=0.0)
    of_head = head * CHANNELS + row
    rates = tl.load(rate + of_head[:, None] * SIZE + column[None, :], mask=inside[:, None] & of_size, other=0.0)
    skipped = tl.load(skip + of_head, mask=inside, other=0.0)
    for at in range(begin, end):
        token = tl.cast(at, tl.int64)
        here = token * HEADS * CHANNELS + of_head
        given = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        step = tl.load(steps + here, mask=inside, other=0.0)
        written = tl.load(write + token * SIZE + column, mask=column < SIZE, other=0.0)
        looked = tl.load(read + token * SIZE + column, mask=column < SIZE, other=0.0)
        numbers = numbers * tl.exp(step[:, None] * rates) + (step * given)[:, None] * written[None, :]
        found = tl.where(destination >= 0, tl.sum(numbers * looked[None, :], 1) + skipped * given, 0.0)
        tl.store(out + here, found.to(out.dtype.element_ty), mask=inside)
        if kept is not None:
            block = tl.load(kept + token).to(tl.int64)
            wanted = (row < tl.where(block >= 0, CHANNELS, 0))[:, None] & of_size
            tl.store(states + block * block_stride + place, numbers, mask=wanted)
    # The state that is written may be the one that was read.
    tl.debug_barrier()
    tl.store(states + destination * block_stride + place, numbers, mask=stored)


def mamba_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    """Computes ``reference.mamba_scan``."""
    _, heads, channels = x.shape
    size = state.shape[3]
    x, steps, write, read = (each.contiguous() for each in (x, steps, write, read))
    out = torch.empty_like(x)
    rows = min(32, triton.next_power_of_2(channels))
    _channel_scan_kernel[(len(runs.sources), heads, triton.cdiv(channels, rows))](
        x,
        steps,
        write,
        read,
        rate,
        skip,
        state,
        runs.starts,
        runs.sources,
        runs.destinations,
        runs.kept,
        out,
        state.stride(0),
        state.stride(1),
        heads,
        channels,
        size,
        rows,
        triton.next_power_of_2(size),
    )
    return out
