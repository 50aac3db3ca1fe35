"""Samples the next token of each request, and reports log probabilities where they are asked for.

A token is a function of the request's logits, its parameters, its tokens so far, its seed and the token's position, and
of nothing else: it is the same alone or in a batch, on a prefill or a decode node. (The logits themselves can differ
with the batch by rounding: below 1e-4 in fp32, with which no answer was seen to change, and in bf16 by enough to change
a close choice.) Log probabilities are by the model's own distribution.

A parameter that no request sets costs nothing: a greedy row takes part in one ``max`` over all rows.

A model that was asked for JSON writes JSON nearly everywhere. So a row with a grammar mostly gets a token as if it had
none, of which its grammar is then asked (``_proposes``). Only where it says no, all of its tokens have to be known.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from pdserve.engine.sampling.grammar_step import GrammarStep
from pdserve.engine.sampling.logit_rules import closes_tokens
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.sampling.token_choice import GREEDY_BELOW, TokenChoice
from pdserve.wire.sampling_params import SampledToken, TokenLogprobs


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Set[int] = frozenset()
) -> list[SampledToken | None]:
    """Returns one token a row, or None where the logits are not finite, or the row's grammar leaves no token.

    A row whose matcher is ``awaited`` has no token either: it can have one in a later step.

    ``logits`` is fp32 ``[rows, vocab_size]`` and is not changed. ``min_tokens`` forbids ``eos_token_ids`` as well as a
    request's own stop tokens.
    """
    on_gpu, grammars = logits.device.type != "cpu", GrammarStep(rows, logits.shape[-1], eos_token_ids)
    constrained = [index for index, row in enumerate(rows) if row.sampling.grammar is not None]
    proposing = {index for index in constrained if _proposes(rows[index])}
    # A GPU may still compute the logits meanwhile.
    early = {index for index in proposing if on_gpu and grammars.has_time(index)}
    grammars.make_masks(index for index in constrained if index in early or index not in proposing)
    choice = TokenChoice(logits, rows, eos_token_ids)
    choice.drop(grammars.without_token)
    masks = {index: bits for index, bits in grammars.masks.items() if index not in proposing}
    choice.choose(choice.left(range(len(rows))), masks)
    rejected = grammars.rejected({index: choice.tokens[index] for index in choice.left(proposing)})
    grammars.make_masks(index for index in rejected if index not in grammars.masks)
    choice.drop(grammars.without_token)
    choice.choose(choice.left(rejected), grammars.masks, again=True)
    tokens, finite = choice.tokens, choice.finite
    reports = _reports(logits, rows, tokens, finite)
    return [SampledToken(token, reports.get(index)) if finite[index] else None for index, token in enumerate(tokens)]


def _proposes(row: SamplingRow) -> bool:
    """Returns whether the token of a row with a grammar is first chosen without the grammar.

    If the grammar allows that token, it is the answer's, and otherwise one is drawn among those that the grammar
    allows. The chances of each are the same as if it had been drawn among those at first. Where the distribution is
    cut by its best tokens, or tokens are forbidden besides, they would not be: the grammar comes before these.
    """
    sampling = row.sampling
    greedy = sampling.temperature < GREEDY_BELOW
    whole = sampling.top_p >= 1 and not sampling.top_k and not sampling.min_p
    return (greedy or whole) and not closes_tokens(row)


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
