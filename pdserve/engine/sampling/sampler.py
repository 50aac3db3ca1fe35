"""Samples the next token of each request, and reports log probabilities where they are asked for.

A token is a function of the request's logits, its parameters, its tokens so far, its seed and the token's position, and
of nothing else: it is the same alone or in a batch, on a prefill or a decode node. (The logits themselves can differ
with the batch by rounding: below 1e-4 in fp32, with which no answer was seen to change, and in bf16 by enough to change
a close choice.) Log probabilities are by the model's own distribution.

A parameter that no request sets costs nothing: a greedy row takes part in one ``max`` over all rows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from pdserve.engine.sampling.drawing import draw, uniform
from pdserve.engine.sampling.logit_rules import apply_rules, grammar_bits, has_rules
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.wire.sampling_params import SampledToken, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would give the same token, or overflow."""

CPU_LOGITS_AT_ONCE = 2**17
"""On a CPU, rows are drawn in groups of about so many logits, which stay in its caches (3 times as fast)."""


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Set[int] = frozenset()
) -> list[SampledToken | None]:
    """Returns one token a row, or None where the logits are not finite, or the row's grammar leaves no token.

    ``logits`` is fp32 ``[rows, vocab_size]`` and is not changed. ``min_tokens`` forbids ``eos_token_ids`` as well as a
    request's own stop tokens.
    """
    # A GPU may still compute the logits meanwhile.
    grammars = {
        index: grammar_bits(row, logits.shape[-1], eos_token_ids)
        for index, row in enumerate(rows)
        if row.sampling.grammar is not None
    }
    best = logits.max(-1)
    tokens: list[int] = best.indices.tolist()
    finite: list[bool] = best.values.isfinite().tolist()
    for index, bits in grammars.items():
        finite[index] &= bits is not None
    ruled = {index for index, row in enumerate(rows) if finite[index] and has_rules(row)}
    drawn = {i for i, row in enumerate(rows) if finite[i] and row.sampling.temperature >= GREEDY_BELOW}

    def choosable(group: list[int]) -> torch.Tensor:
        """Returns a copy of the group's logits after the rules. The copy stays in a CPU's caches until the choice."""
        own = torch.stack([logits[index] for index in group])
        if ruled.isdisjoint(group):
            return own
        constrained = {at: bits for at, index in enumerate(group) if (bits := grammars.get(index)) is not None}
        own = apply_rules(own, [rows[index] for index in group], eos_token_ids, constrained)
        for at, sane in enumerate(own.amax(-1).isfinite().tolist()):
            if not sane:
                finite[group[at]] = False
                own[at] = 0.0
        return own

    for group in draw_groups(sorted(ruled - drawn), logits):
        for index, token in zip(group, choosable(group).argmax(-1).tolist(), strict=True):
            tokens[index] = token
    for group in draw_groups(sorted(drawn), logits):
        own = choosable(group)
        params = [rows[index].sampling for index in group]
        uniforms = [uniform(rows[index].sampling.seed, rows[index].position) for index in group]
        for index, token in zip(group, draw(own, params, uniforms).tolist(), strict=True):
            tokens[index] = token
    reports = _reports(logits, rows, tokens, finite)
    return [SampledToken(token, reports.get(index)) if finite[index] else None for index, token in enumerate(tokens)]


def draw_groups(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """Divides ``rows`` into the groups that are drawn together."""
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
    named = [rows[index].sampling.logprob_token_ids for index in asking]
    likeliest = [0 if ids else count for ids, count in zip(named, counts.values(), strict=True)]
    found = token_logprobs(logits[asking], [tokens[index] for index in asking], likeliest, named)
    return dict(zip(asking, found, strict=True))


def token_logprobs(
    logits: torch.Tensor, sampled: Sequence[int], counts: Sequence[int], named: Sequence[Sequence[int]]
) -> list[TokenLogprobs]:
    """Returns log probabilities of each row's sampled token, and of its ``counts[row]`` likeliest or ``named[row]``.

    ``logits`` is fp32 ``[rows, vocab_size]``. Equally likely tokens come in the order of their ids, so that the answer
    depends on neither device nor batch.
    """
    column = torch.tensor(sampled, device=logits.device).unsqueeze(1)
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, column)
    ranks = (logits > own).sum(-1) + 1
    beside = zip(_likeliest(logits, normaliser, counts), _named(logits, normaliser, named), strict=True)
    own_logprobs = (own - normaliser).squeeze(1)
    return [
        TokenLogprobs(logprob, rank, (*likeliest, *own_named))
        for logprob, rank, (likeliest, own_named) in zip(own_logprobs.tolist(), ranks.tolist(), beside, strict=True)
    ]


def _likeliest(logits: torch.Tensor, normaliser: torch.Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    found: list[list[tuple[int, float]]] = [[] for _ in counts]
    wanted = [min(count, logits.shape[-1]) for count in counts]
    if not any(wanted):
        return found
    best = logits.topk(max(wanted)).values
    last = torch.tensor([max(count - 1, 0) for count in wanted], device=logits.device).unsqueeze(1)
    # It is not defined which of several equal tokens topk takes, so all of them are looked at.
    row, token = (logits >= best.gather(1, last)).nonzero(as_tuple=True)
    logprobs = (logits - normaliser)[row, token]
    for at, token_id, logprob in zip(row.tolist(), token.tolist(), logprobs.tolist(), strict=True):
        found[at].append((token_id, logprob))
    return [sorted(tokens, key=_by_likelihood)[:count] for tokens, count in zip(found, wanted, strict=True)]


def _named(
    logits: torch.Tensor, normaliser: torch.Tensor, named: Sequence[Sequence[int]]
) -> list[list[tuple[int, float]]]:
    found: list[list[tuple[int, float]]] = [[] for _ in named]
    places = [(at, token_id) for at, ids in enumerate(named) for token_id in ids]
    if not places:
        return found
    row, token = torch.tensor(places, device=logits.device).unbind(1)
    logprobs = logits[row, token] - normaliser[row, 0]
    for (at, token_id), logprob in zip(places, logprobs.tolist(), strict=True):
        found[at].append((token_id, logprob))
    return [sorted(tokens, key=_by_likelihood) for tokens in found]


def _by_likelihood(pair: tuple[int, float]) -> tuple[float, int]:
    token_id, logprob = pair
    return -logprob, token_id
