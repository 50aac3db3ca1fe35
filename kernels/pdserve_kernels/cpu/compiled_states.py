"""Calls the compiled operations of layers that keep a state."""

from __future__ import annotations

import ctypes

import torch

from pdserve_kernels.contract import StateRuns, check_states
from pdserve_kernels.cpu.library import CChannelScan, CConv, CDelta, CRuns, CScan, Library


def causal_conv(
    library: Library,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    runs: StateRuns,
    *,
    silu: bool,
) -> torch.Tensor:
    """Computes ``reference.causal_conv`` in bf16 or fp32."""
    tokens, heads, channels = x.shape
    width = weight.shape[0]
    check_states(state, (heads, width - 1, channels))
    x = x.contiguous()
    weight = _like(x, weight, (width, heads, channels))
    bias = None if bias is None else _like(x, bias, (heads, channels))
    out = torch.empty_like(x)
    conv = CConv(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        heads=heads,
        channels=channels,
        width=width,
        silu=int(silu),
    )
    library.causal_conv(_bf16(x), ctypes.byref(_runs(runs, state, tokens)), ctypes.byref(conv))
    return out


def gated_delta_rule(
    library: Library,
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    """Computes ``reference.gated_delta_rule`` in bf16 or fp32."""
    tokens, heads, _ = qkv.shape
    group, key_dim, value_dim = state.shape[2:]
    check_states(state, (heads, group, key_dim, value_dim))
    qkv = qkv.contiguous()
    if qkv.shape[2] != 2 * key_dim + group * value_dim:
        raise ValueError(f"a state of {tuple(state.shape)} was given {tuple(qkv.shape)}")
    by_channel = decay.dim() == 4
    decay = _fp32(decay, (tokens, heads, group, key_dim) if by_channel else (tokens, heads, group))
    beta = _fp32(beta, (tokens, heads, group))
    out = qkv.new_empty((tokens, heads, group, value_dim))
    delta = CDelta(
        qkv=qkv.data_ptr(),
        decay=decay.data_ptr(),
        beta=beta.data_ptr(),
        out=out.data_ptr(),
        heads=heads,
        group=group,
        key_dim=key_dim,
        value_dim=value_dim,
        by_channel=int(by_channel),
    )
    library.gated_delta_rule(_bf16(qkv), ctypes.byref(_runs(runs, state, tokens)), ctypes.byref(delta))
    return out


def mamba2_scan(
    library: Library,
    xbc: torch.Tensor,
    steps: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    """Computes ``reference.mamba2_scan`` in bf16 or fp32."""
    tokens, groups, width = xbc.shape
    heads, head_dim, size = state.shape[2:]
    check_states(state, (groups, heads, head_dim, size))
    xbc = xbc.contiguous()
    if width != heads * head_dim + 2 * size:
        raise ValueError(f"a state of {tuple(state.shape)} was given {tuple(xbc.shape)}")
    steps = _fp32(steps, (tokens, groups, heads))
    rate, skip = (_fp32(each, (groups, heads)) for each in (rate, skip))
    out = xbc.new_empty((tokens, groups, heads, head_dim))
    scan = CScan(
        xbc=xbc.data_ptr(),
        steps=steps.data_ptr(),
        rate=rate.data_ptr(),
        skip=skip.data_ptr(),
        out=out.data_ptr(),
        groups=groups,
        heads=heads,
        head_dim=head_dim,
        size=size,
    )
    library.mamba2_scan(_bf16(xbc), ctypes.byref(_runs(runs, state, tokens)), ctypes.byref(scan))
    return out


def mamba_scan(
    library: Library,
    x: torch.Tensor,
    steps: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    """Computes ``reference.mamba_scan`` in bf16 or fp32."""
    tokens, heads, channels = x.shape
    size = state.shape[3]
    check_states(state, (heads, channels, size))
    x, steps = x.contiguous(), _fp32(steps, (tokens, heads, channels))
    write, read = (_fp32(each, (tokens, size)) for each in (write, read))
    rate, skip = _fp32(rate, (heads, channels, size)), _fp32(skip, (heads, channels))
    out = torch.empty_like(x)
    scan = CChannelScan(
        x=x.data_ptr(),
        steps=steps.data_ptr(),
        write=write.data_ptr(),
        read=read.data_ptr(),
        rate=rate.data_ptr(),
        skip=skip.data_ptr(),
        out=out.data_ptr(),
        heads=heads,
        channels=channels,
        size=size,
    )
    library.mamba_scan(_bf16(x), ctypes.byref(_runs(runs, state, tokens)), ctypes.byref(scan))
    return out


def _runs(runs: StateRuns, state: torch.Tensor, tokens: int) -> CRuns:
    return CRuns(
        starts=runs.starts.data_ptr(),
        sources=runs.sources.data_ptr(),
        destinations=runs.destinations.data_ptr(),
        kept=None if runs.kept is None else runs.kept.data_ptr(),
        states=state.data_ptr(),
        count=len(runs.sources),
        tokens=tokens,
        block_stride=state.stride(0),
        head_stride=state.stride(1),
    )


def _like(x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if weight.shape != shape or weight.dtype is not x.dtype:
        raise ValueError(f"{x.dtype} weights of {shape} are wanted, and there are {weight.dtype} {tuple(weight.shape)}")
    return weight.contiguous()


def _fp32(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if x.shape != shape or x.dtype is not torch.float32:
        raise ValueError(f"fp32 numbers of {shape} are wanted, and there are {x.dtype} {tuple(x.shape)}")
    return x.contiguous()


def _bf16(x: torch.Tensor) -> int:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"the compiled kernels compute in bf16 and fp32, not in {x.dtype}")
    return int(x.dtype is torch.bfloat16)
