"""Says in plain torch what each operation means. It is slow and obvious; every faster form is tested against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdserve_kernels.contract import ExpertsForm, HeadNorms, StateRuns
from pdserve_kernels.feed_forward import (
    CLAMPED_AT,
    CLAMPED_SLOPE,
    LIMITED_AT,
    SILU_BOUNDS,
    Activation,
    GroupScore,
    Routing,
    Scoring,
)
from pdserve_kernels.kv_layout import KvLayout


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Applies root mean square normalisation (Zhang and Sennrich, 2019) over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(rms_norm(x + residual), x + residual)``."""
    total = x + residual
    return rms_norm(total, weight, eps), total


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """Satisfies ``contract.HeadLinear``, with weights ``[heads, out, in]``."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)

    def of_one(self, x: torch.Tensor, heads: slice) -> torch.Tensor:
        some = self.weight[heads]
        return F.linear(x, some.flatten(0, 1)).view(len(x), *some.shape[:2])


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary position embedding (Su et al., 2021), which rotates the halves against each other.

    ``x`` is ``[tokens, heads, head_dim]``; ``cos`` and ``sin`` are ``[tokens, head_dim / 2]``.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def projected(
    qkv: torch.Tensor, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns query, and key with value, as ``contract.Attention`` takes them: heads are normalised, then rotated.

    ``qkv`` is ``[tokens, heads + 2 * kv_heads, head_dim]``: query heads, key heads, value heads.
    """
    query, key, value = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
    rotated = rotary(torch.cat((query, key), 1), cos, sin)
    query, key = torch.split(rotated, [rotated.shape[1] - kv_heads, kv_heads], 1)
    return query, torch.stack((key, value))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


_ALONE: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: _relu_squared,
    Activation.SIGMOID: torch.sigmoid,
    Activation.SOFTPLUS: F.softplus,
}


def activated(inner: torch.Tensor, activation: Activation, *, gated: bool) -> torch.Tensor:
    """Returns ``activation(gate) * up`` for ``[..., 2 * width]``, or without gates ``activation(inner)``."""
    if not gated:
        return _ALONE[activation](inner)
    gate, up = inner.chunk(2, -1)
    if activation is Activation.CLAMPED_SILU:
        gate, up = gate.clamp(max=CLAMPED_AT), up.clamp(-CLAMPED_AT, CLAMPED_AT)
        return (up + 1) * (gate * torch.sigmoid(gate * CLAMPED_SLOPE))
    for bound, bounded in SILU_BOUNDS.items():
        if activation is bounded:
            return F.silu(gate).clamp(max=bound) * up.clamp(-bound, bound)
    if activation is Activation.LIMITED_SILU:
        return F.silu(gate.clamp(max=LIMITED_AT)) * up.clamp(-LIMITED_AT, LIMITED_AT)
    return _ALONE[activation](gate) * up


LEAST_EXPONENT = 16
"""The smallest exponent that is stored with numbers in FP8. With it, bf16 has all of them as normal numbers."""
NOT_FINITE = 255
"""The exponent that is stored where a number was not finite: all numbers that are read there are NaN."""
_LARGEST_EXPONENT = 7
"""The largest of some numbers is scaled to [128, 256). e4m3 ends at 448, so no number is rounded beyond its end."""


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``x``, ``[..., head_dim]``, in FP8: e4m3 as uint8 of its shape, and exponents, uint8 ``[...]``.

    The scale of a row is a power of two, so that it adds no error of its own: a number is off by 1/16 of itself at
    most, or by 2 ** -17 of the largest of its row.
    """
    wide = x.float()
    bits = wide.abs().amax(-1).nan_to_num(torch.inf, torch.inf).view(torch.int32) >> 23
    finite = bits < 255
    exponent = (bits - _LARGEST_EXPONENT).clamp(min=LEAST_EXPONENT)
    # 2 ** -(exponent - 127): of an fp32 number, the exponent is stored in the same way.
    factor = ((254 - exponent) << 23).view(torch.float32)
    scaled = torch.where(finite.unsqueeze(-1), wide * factor.unsqueeze(-1), 0.0)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), torch.where(finite, exponent, NOT_FINITE).to(torch.uint8)


def dequantised(numbers: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns in ``dtype`` what ``quantised`` made. bf16 and fp32 have each of these numbers exactly."""
    scale = (exponents.int() << 23).view(torch.float32).to(dtype)
    return numbers.view(torch.float8_e4m3fn).to(dtype).mul_(scale.unsqueeze(-1))


LARGEST_FP8 = 448.0
LEAST_ROUNDED = 2.0**-95
"""Inputs whose largest is smaller are scaled as if it were this one."""


def rounded_inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``x``, ``[..., inputs]``, as products in FP8 take it: e4m3 of its shape, and scales, fp32 ``[...]``.

    The largest number becomes the largest of e4m3, so it is not rounded: a product with few large inputs is off by
    less than with scales of powers of two. If a number is not finite, all of its row are 0, and the scale is infinite.
    """
    largest = x.float().abs().amax(-1).nan_to_num(torch.inf, torch.inf)
    finite = largest.isfinite()
    some = torch.where(finite, largest.clamp(min=LEAST_ROUNDED), LARGEST_FP8)
    scaled = torch.where(finite.unsqueeze(-1), x.float() * (LARGEST_FP8 / some).unsqueeze(-1), 0.0)
    return scaled.to(torch.float8_e4m3fn), torch.where(finite, some / LARGEST_FP8, torch.inf)


def stored(cache: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """Returns blocks in the model's dtype, ``[num_blocks, kv_heads, layers, tiles, block_size, head_dim]``."""
    return dequantised(*layout.split(cache), layout.dtype) if layout.fp8 else cache


def kv_write(
    cache: torch.Tensor, layout: KvLayout, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Stores ``key`` and ``value``, ``[tokens, kv_heads, head_dim]``, or keys alone if these have the values in them.

    ``slots`` has ``block * block_size + offset`` of each token.
    """
    for i, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, layout.block_size)
        for tile, given in enumerate((key,) if layout.shared_channels else (key, value)):
            to = cache[block, :, layer, tile]
            if layout.fp8:
                numbers, exponents = layout.split(to)
                numbers[:, offset], exponents[:, offset] = quantised(given[i])
            else:
                to[:, offset] = given[i]


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    layout: KvLayout,
    layer: int,
    blocks: list[int],
    context_len: int,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    *,
    chunked: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes causal grouped-query attention of one request's newest tokens over its paged context.

    ``query`` is ``[new_tokens, heads, head_dim]``, the last ``new_tokens`` of ``context_len``, whose keys and values
    are in the cache already. Returns ``[new_tokens, heads, value_dim]``. ``scale`` is ``head_dim ** -0.5`` if not
    given; with a ``window``, a token sees itself and the ``window - 1`` before it, or, if it is ``chunked``, those from
    the last multiple of ``window`` on; with a ``cap``, a score ``x`` becomes ``cap * tanh(x / cap)``.
    ``sinks``, ``[heads]``, are scores of one more key without a value.
    """
    new, heads, head_dim = query.shape
    tiles = stored(cache[blocks, :, layer], layout).float()
    by_head = tiles.permute(2, 1, 0, 3, 4).reshape(layout.tiles_a_layer, layout.kv_heads, -1, head_dim)
    keys, values = by_head[0, :, :context_len], by_head[-1, :, :context_len, : layout.value_dim]
    group = heads // layout.kv_heads
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("qhd,hkd->hqk", query.float(), keys) * (head_dim**-0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    query_at = torch.arange(context_len - new, context_len).unsqueeze(1)
    key_at = torch.arange(context_len).unsqueeze(0)
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at < first_seen(query_at, window, chunked=chunked)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, new, 1)), -1)
    weights = scores.softmax(-1)[..., :context_len]
    return torch.einsum("hqk,hkd->qhd", weights, values).to(query.dtype)


def index_scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the score of each of ``keys``, ``[context, channels]``, for one token, fp32 ``[context]``.

    ``query``, ``[heads, channels]``, and ``weights``, fp32 ``[heads]``, are those of ``contract.IndexQueries``.
    """
    return F.relu(keys.float() @ query.float().T) @ weights


def chosen(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the places of the ``count`` highest of ``scores``, ``[context]``, in their order; of all if these are
    not more. Of equal scores, those at lower places are chosen. NaN is as high as infinity.
    """
    known = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
    return known.sort(descending=True, stable=True).indices[:count].sort().values


def first_seen(positions: torch.Tensor, window: int, *, chunked: bool) -> torch.Tensor:
    """Returns the first position that the token at each of ``positions`` sees; below 0 if it sees all before it."""
    return positions - positions % window if chunked else positions - window + 1


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Returns these blocks of the cache, one after another, as ``[len(blocks), ...]``."""
    return cache[blocks]


def scatter_blocks(cache: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
    """Puts ``staged``, ``[len(blocks), ...]``, into these blocks of the cache, which all differ."""
    cache[blocks] = staged


def _kept(runs: StateRuns, tokens: int) -> Sequence[int]:
    """Returns the block in which the state after each token stays, or -1."""
    return [-1] * tokens if runs.kept is None else runs.kept.tolist()


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    runs: StateRuns,
    *,
    silu: bool,
) -> torch.Tensor:
    """Returns each channel's weighted sum over its last ``width`` tokens, those before a run from its state.

    ``x`` is ``[tokens, heads, channels]``, ``weight`` ``[width, heads, channels]`` with the oldest token's first, and
    ``bias`` ``[heads, channels]``. ``state`` is fp32 ``[num_blocks, heads, width - 1, channels]``, a strided view, and
    has the last ``width - 1`` tokens. With ``silu``, the sums go through that function.
    """
    width, weights = weight.shape[0], weight.float()
    out = torch.zeros_like(x)
    starts, sources, destinations = (each.tolist() for each in (runs.starts, runs.sources, runs.destinations))
    kept = _kept(runs, len(out))
    for first, end, source, destination in zip(starts, starts[1:], sources, destinations, strict=False):
        if destination < 0:
            continue
        before = torch.zeros_like(state[0]) if source < 0 else state[source]
        seen = torch.cat((before.transpose(0, 1), x[first:end].float()))
        total = seen[: end - first] * weights[0]
        for tap in range(1, width):
            total = total + seen[tap : tap + end - first] * weights[tap]
        if bias is not None:
            total = total + bias.float()
        out[first:end] = F.silu(total) if silu else total
        for at in range(first, end):
            if kept[at] >= 0:
                state[kept[at]] = seen[at - first + 1 : at - first + width].transpose(0, 1)
        state[destination] = seen[end - first :].transpose(0, 1)
    return out


def gated_delta_rule(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, runs: StateRuns
) -> torch.Tensor:
    """Updates a matrix by each token, and reads it: the gated delta rule (Yang et al., 2024).

    ``qkv`` is ``[tokens, heads, 2 * key_dim + group * value_dim]``: of each key head its query, its key, and the values
    of its ``group`` value heads. ``decay``, the logarithm of what a matrix is multiplied by, and ``beta`` are fp32
    ``[tokens, heads, group]``. ``state`` is fp32 ``[num_blocks, heads, group, key_dim, value_dim]``, a strided view.
    Query and key are scaled to length 1, and the query then by ``key_dim ** -0.5``. Returns ``[tokens, heads, group,
    value_dim]``.

    ``decay`` may be ``[tokens, heads, group, key_dim]``, and each row of a matrix is then multiplied by its own (Kimi
    Delta Attention, Kimi Team, 2025).
    """
    _, heads, group, key_dim, value_dim = state.shape
    query, key, value = torch.split(qkv.float(), [key_dim, key_dim, group * value_dim], -1)
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * key_dim**-0.5
    value = value.reshape(-1, heads, group, value_dim)
    factor = decay.exp().view(*decay.shape[:3], -1, 1)
    out = qkv.new_zeros(len(qkv), heads, group, value_dim)
    starts, sources, destinations = (each.tolist() for each in (runs.starts, runs.sources, runs.destinations))
    kept = _kept(runs, len(out))
    for first, end, source, destination in zip(starts, starts[1:], sources, destinations, strict=False):
        if destination < 0:
            continue
        matrix = torch.zeros_like(state[0]) if source < 0 else state[source].clone()
        for at in range(first, end):
            k, q = key[at, :, None, :, None], query[at, :, None, :, None]
            matrix = matrix * factor[at]
            found = (matrix * k).sum(-2)
            delta = (value[at] - found) * beta[at].unsqueeze(-1)
            matrix = matrix + k * delta.unsqueeze(-2)
            out[at] = (matrix * q).sum(-2)
            if kept[at] >= 0:
                state[kept[at]] = matrix
        state[destination] = matrix
    return out


def mamba2_scan(
    xbc: torch.Tensor,
    steps: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    """Updates a matrix for each head by each token, and reads it: the scan of Mamba 2 (Dao and Gu, 2024).

    ``xbc`` is ``[tokens, groups, heads * head_dim + 2 * size]``: of each group the inputs of its ``heads`` heads, and
    what they are written (B) and read (C) with. ``steps``, fp32 ``[tokens, groups, heads]``, are the lengths of the
    tokens' steps. ``rate``, the negative rate at which a matrix decays, and ``skip``, the part of an input that goes
    past it, are fp32 ``[groups, heads]``. ``state`` is fp32 ``[num_blocks, groups, heads, head_dim, size]``, a strided
    view. Returns ``[tokens, groups, heads, head_dim]``.
    """
    _, groups, heads, head_dim, size = state.shape
    x, write, read = torch.split(xbc.float(), [heads * head_dim, size, size], -1)
    x = x.reshape(-1, groups, heads, head_dim)
    factor, out = (steps * rate).exp(), xbc.new_zeros(len(xbc), groups, heads, head_dim)
    starts, sources, destinations = (each.tolist() for each in (runs.starts, runs.sources, runs.destinations))
    kept = _kept(runs, len(out))
    for first, end, source, destination in zip(starts, starts[1:], sources, destinations, strict=False):
        if destination < 0:
            continue
        matrix = torch.zeros_like(state[0]) if source < 0 else state[source].clone()
        for at in range(first, end):
            added = (steps[at].unsqueeze(-1) * x[at]).unsqueeze(-1) * write[at, :, None, None, :]
            matrix = matrix * factor[at, :, :, None, None] + added
            out[at] = (matrix * read[at, :, None, None, :]).sum(-1) + skip.unsqueeze(-1) * x[at]
            if kept[at] >= 0:
                state[kept[at]] = matrix
        state[destination] = matrix
    return out


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
    """Updates the numbers of each channel by each token, and reads them: the scan of Mamba (Gu and Dao, 2023).

    ``x``, ``[tokens, heads, channels]``, are the inputs, and ``steps``, fp32 of the same shape, the lengths of the
    tokens' steps. ``write`` (B) and ``read`` (C), fp32 ``[tokens, size]``, are what all channels are written and read
    with. ``rate``, fp32 ``[heads, channels, size]``, are the negative rates at which numbers decay, and ``skip``, fp32
    ``[heads, channels]``, the part of an input that goes past them. ``state`` is fp32 ``[num_blocks, heads, channels,
    size]``, a strided view. Returns a tensor as ``x``.
    """
    inputs, out = x.float(), torch.zeros_like(x)
    starts, sources, destinations = (each.tolist() for each in (runs.starts, runs.sources, runs.destinations))
    kept = _kept(runs, len(out))
    for first, end, source, destination in zip(starts, starts[1:], sources, destinations, strict=False):
        if destination < 0:
            continue
        numbers = torch.zeros_like(state[0]) if source < 0 else state[source].clone()
        for at in range(first, end):
            step = steps[at].unsqueeze(-1)
            numbers = numbers * (step * rate).exp() + step * inputs[at].unsqueeze(-1) * write[at]
            out[at] = (numbers * read[at]).sum(-1) + skip * inputs[at]
            if kept[at] >= 0:
                state[kept[at]] = numbers
        state[destination] = numbers
    return out


def route(
    logits: torch.Tensor, rule: Routing, correction: torch.Tensor | None = None, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the fp32 weights and the indexes of each token's experts, both ``[tokens, chosen]``.

    ``logits`` is ``[tokens, experts]``. ``correction``, ``[experts]``, is added to the scores by which experts are
    chosen. The weights are multiplied by ``factors``, ``[experts]``, at the end.
    """
    match rule.scoring:
        case Scoring.SOFTMAX:
            scores = logits.softmax(-1, dtype=torch.float32)
        case Scoring.SOFTMAX_OF_CHOSEN | Scoring.SIGMOID_OF_CHOSEN:
            scores = logits.float()
        case Scoring.SIGMOID:
            scores = logits.float().sigmoid()
        case Scoring.ROOT_SOFTPLUS:
            scores = F.softplus(logits.float()).sqrt()
    compared = scores if correction is None else scores + correction
    if rule.groups > 1:
        grouped = compared.view(len(compared), rule.groups, -1)
        best = grouped.topk(2 if rule.group_score is GroupScore.TWO_BEST else 1, -1).values.sum(-1)
        chosen = best.topk(rule.chosen_groups, -1).indices
        barred = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, value=False)
        compared = grouped.masked_fill(barred.unsqueeze(-1), float("-inf")).flatten(1)
    experts = compared.topk(rule.chosen, -1).indices
    weights = scores.gather(-1, experts)
    if rule.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    if rule.scoring is Scoring.SIGMOID_OF_CHOSEN:
        weights = weights.sigmoid()
    if rule.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.smallest_sum)
    if rule.scale != 1.0:
        weights = weights * rule.scale
    if factors is not None:
        weights = weights * factors[experts]
    return weights, experts


def with_identities(
    form: ExpertsForm, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, beside: torch.Tensor | None
) -> torch.Tensor | None:
    """Returns what is ``beside`` the experts with weights: what it is, and what the ``form.identities`` of them give.

    ``weights`` and ``chosen`` are those of ``route``. The sum is taken in fp32, and has the numbers of ``x``.
    """
    if not form.identities:
        return beside
    share = weights.masked_fill(chosen < form.count - form.identities, 0.0).sum(-1, keepdim=True)
    own = x.float() * share
    return (own if beside is None else own + beside.float()).to(x.dtype)


Dense = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""The weights of an expert, ``[inner, hidden]`` and ``[hidden, channels]``, and their biases."""


def experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    form: ExpertsForm,
    weights: Sequence[Dense],
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the weighted sum of each row's chosen experts, and of what is ``beside`` them.

    All is computed in fp32, and the result is rounded to the numbers of ``x``, ``[rows, hidden]``.
    """
    factors, chosen = route(logits, form.routing, form.correction, form.factors)
    beside = with_identities(form, x, factors, chosen, beside)
    out = torch.zeros_like(x, dtype=torch.float32) if beside is None else beside.float()
    for number, (inner, down, inner_bias, down_bias) in zip(form.own, weights, strict=True):
        rows, places = (chosen == number).nonzero(as_tuple=True)
        weight, given = factors[rows, places].unsqueeze(1), x[rows].float()
        if form.weighs_inputs:
            given = given * weight
        middle = activated(_product(given, inner, inner_bias), form.activation, gated=form.gated)
        result = _product(middle, down, down_bias)
        out = out.index_add(0, rows, result if form.weighs_inputs else result * weight)
    return out.to(x.dtype)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.float(), None if bias is None else bias.float())
