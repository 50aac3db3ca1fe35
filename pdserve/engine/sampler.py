"""Choose the next token of each request.

A token is a function of the request's logits, its parameters, its tokens so far, its seed and the token's position,
and of nothing else: it is the same alone or in a batch, on a prefill or a decode node. (The logits themselves can
differ with the batch by rounding: below 1e-4 in fp32, where no answer was seen to change; in bf16 enough to change a
close choice.)

What nobody asks for costs nothing: a greedy row takes part in one ``max`` over all rows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from pdserve.engine.logit_rules import apply_rules, has_rules
from pdserve.engine.random_choice import draw, uniform
from pdserve.engine.sampling_row import SamplingRow
from pdserve.engine.token_logprobs import token_logprobs
from pdserve.wire.sampling import SampledToken, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures under it are greedy: dividing by them says nothing else, and overflows."""

CPU_LOGITS_AT_ONCE = 2**17
"""On a CPU, rows are drawn in groups of about so many logits, which stay in its caches (3 times as fast)."""


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Set[int] = frozenset()
) -> list[SampledToken | None]:
    """One choice a row; None where the logits are not finite, so that nothing can be said.

    ``logits`` is fp32 ``[rows, vocab_size]`` and stays as it is. ``eos_token_ids`` are what ``min_tokens`` holds off
    besides a request's own stop tokens.
    """
    best = logits.max(-1)
    tokens: list[int] = best.indices.tolist()
    finite: list[bool] = best.values.isfinite().tolist()
    shaped: dict[int, torch.Tensor] = {}
    ruled = [index for index, row in enumerate(rows) if finite[index] and has_rules(row)]
    if ruled:
        changed = apply_rules(logits[ruled], [rows[index] for index in ruled], eos_token_ids)
        best = changed.max(-1)
        for index, own, token, sane in zip(
            ruled, changed, best.indices.tolist(), best.values.isfinite().tolist(), strict=True
        ):
            shaped[index], tokens[index], finite[index] = own, token, sane
    drawn = [i for i, row in enumerate(rows) if finite[i] and row.sampling.temperature >= GREEDY_BELOW]
    for group in groups(drawn, logits):
        own_logits = [shaped.get(index, logits[index]) for index in group]
        params = [rows[index].sampling for index in group]
        uniforms = [uniform(rows[index].sampling.seed, rows[index].position) for index in group]
        for index, token in zip(group, draw(torch.stack(own_logits), params, uniforms).tolist(), strict=True):
            tokens[index] = token
    reports = _reports(logits, rows, tokens, finite)
    return [SampledToken(token, reports.get(index)) if finite[index] else None for index, token in enumerate(tokens)]


def groups(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """Which of ``rows`` to draw together."""
    if not rows:
        return []
    size = max(CPU_LOGITS_AT_ONCE // logits.shape[-1], 1) if logits.device.type == "cpu" else len(rows)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _reports(
    logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: Sequence[int], finite: Sequence[bool]
) -> dict[int, TokenLogprobs]:
    counts = {
        index: row.sampling.logprobs
        for index, row in enumerate(rows)
        if finite[index] and row.sampling.logprobs is not None
    }
    if not counts:
        return {}
    asking = list(counts)
    found = token_logprobs(logits[asking], [tokens[index] for index in asking], list(counts.values()))
    return dict(zip(asking, found, strict=True))
