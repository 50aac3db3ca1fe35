"""The next token of every row in one launch, so that one small copy tells the host all of them.

The distribution is inverted at a given uniform number as ``pdserve.engine.random_choice`` does it: temperature, then
min-p, then the first token at which the cumulative sum passes. Top-k and top-p need an order of the vocabulary and stay
with that sampler.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _sample_kernel(
    logits, temperatures, min_ps, uniforms, tokens, vocab, row_stride, GREEDY_BELOW: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    best = float("-inf")
    best_at = 0
    unordered = 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        unordered = tl.maximum(unordered, tl.max((x != x).to(tl.int32), 0))
        x = tl.where(x != x, float("-inf"), x)
        highest = tl.max(x, 0)
        at = tl.min(tl.where(x == highest, token, vocab), 0)
        best_at = tl.where(highest > best, at, best_at)
        best = tl.maximum(best, highest)
    temperature = tl.load(temperatures + row)
    finite = (unordered == 0) & (best > float("-inf")) & (best < float("inf"))
    chosen = best_at
    if finite & (temperature >= GREEDY_BELOW):
        min_p = tl.load(min_ps + row)
        total = tl.zeros([1], tl.float64)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
            p = tl.exp((x - best) / temperature)
            total += tl.sum(tl.where(p < min_p, 0.0, p).to(tl.float64), 0)
        threshold = tl.load(uniforms + row) * total
        before = tl.zeros([1], tl.float64)
        chosen = vocab
        last = best_at
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
            p = tl.exp((x - best) / temperature)
            p = tl.where(p < min_p, 0.0, p)
            passed = before + tl.cumsum(p.to(tl.float64), 0) > threshold
            chosen = tl.minimum(chosen, tl.min(tl.where(passed & (token < vocab), token, vocab), 0))
            last = tl.maximum(last, tl.max(tl.where(p > 0, token, 0), 0))
            before += tl.sum(p.to(tl.float64), 0)
        # Rounding at the very end of the distribution: the last token that can be drawn at all.
        chosen = tl.where(chosen == vocab, last, chosen)
    tl.store(tokens + row, tl.where(finite, chosen, -1))


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    min_ps: torch.Tensor,
    uniforms: torch.Tensor,
    greedy_below: float,
) -> torch.Tensor:
    """``reference.sample``; ``logits`` fp32 with a dense last dimension."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        _sample_kernel[(rows,)](
            logits, temperatures, min_ps, uniforms, tokens, vocab, logits.stride(0), greedy_below, BLOCK, num_warps=8
        )
    return tokens
