"""Samples the next token of each request, and reports log probabilities where they are asked for.

A token is a function of the request's logits, its parameters, its tokens so far, its seed and the token's position, and
of nothing else: it is the same alone or in a batch, on a prefill or a decode node. (The logits themselves can differ
with the batch by rounding: below 1e-4 in fp32, with which no answer was seen to change, and in bf16 by enough to change
a close choice.) Log probabilities are by the model's own distribution.

A parameter that no request sets costs nothing: a greedy row takes part in one ``max`` over all rows.

A model that was asked for JSON writes JSON nearly everywhere. So a row with a grammar mostly gets a token as if it had
none, of which its grammar is then asked (``proposes``). Only where it says no, all of its tokens have to be known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch

from pdserve.engine.sampling.drawing import is_drawn
from pdserve.engine.sampling.filters import cuts_any
from pdserve.engine.sampling.grammar_step import GrammarStep
from pdserve.engine.sampling.logit_rules import closes_tokens
from pdserve.engine.sampling.logprobs import PendingReports
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.sampling.token_choice import TokenChoice
from pdserve.wire.sampling_params import SampledToken, TokenLogprobs
from pdserve_kernels.host_copies import to_device


def sample(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    eos_token_ids: Set[int] = frozenset(),
    sources: Sequence[int] | None = None,
) -> list[SampledToken | None]:
    """Returns one token a row, or None where the logits are not finite, or the row's grammar leaves no token.

    A row whose matcher is ``awaited`` has no token either: it can have one in a later step.

    ``logits`` is fp32 ``[rows, vocab_size]`` and is not changed. Several rows may be sampled from the same logits:
    ``sources`` then says from which each is. ``min_tokens`` forbids ``eos_token_ids`` as well as a request's own stop
    tokens.
    """
    sources = range(len(rows)) if sources is None else sources
    if any(row.sampling.grammar is not None for row in rows):
        choice = _chosen_by_grammars(logits, rows, sources, eos_token_ids)
    else:
        choice = TokenChoice.of_best(logits, rows, sources, eos_token_ids)
        choice.choose(choice.left(range(len(rows))), {})
    reports = reports_of(range(len(rows)), logits, rows, sources, choice)
    return [
        SampledToken(token, reports.get(index)) if choice.finite[index] else None
        for index, token in enumerate(choice.tokens)
    ]


def _chosen_by_grammars(
    logits: torch.Tensor, rows: Sequence[SamplingRow], sources: Sequence[int], eos_token_ids: Set[int]
) -> TokenChoice:
    on_gpu, grammars = logits.device.type != "cpu", GrammarStep(rows, logits.shape[-1], eos_token_ids)
    constrained = [index for index, row in enumerate(rows) if row.sampling.grammar is not None]
    proposing = {index for index in constrained if proposes(rows[index])}
    # A GPU may still compute the logits meanwhile.
    early = {index for index in proposing if on_gpu and grammars.has_time(index)}
    grammars.make_masks(index for index in constrained if index in early or index not in proposing)
    choice = TokenChoice.of_best(logits, rows, sources, eos_token_ids)
    choice.drop(grammars.without_token)
    masks = {index: bits for index, bits in grammars.masks.items() if index not in proposing}
    choice.choose(choice.left(range(len(rows))), masks)
    choose_instead(choice, grammars, proposing)
    return choice


def choose_instead(choice: TokenChoice, grammars: GrammarStep, proposing: Iterable[int]) -> None:
    """Asks the grammars of these rows for their tokens, and chooses others where they say no."""
    rejected = grammars.rejected({index: choice.tokens[index] for index in choice.left(proposing)})
    grammars.make_masks(index for index in rejected if index not in grammars.masks)
    choice.drop(grammars.without_token)
    choice.choose(choice.left(rejected), grammars.masks, again=True)


def proposes(row: SamplingRow) -> bool:
    """Returns whether the token of a row with a grammar is first chosen without the grammar.

    If the grammar allows that token, it is the answer's, and otherwise one is drawn among those that the grammar
    allows. The chances of each are the same as if it had been drawn among those at first. Where the distribution is
    cut by its best tokens, or tokens are forbidden besides, they would not be: the grammar comes before these.
    """
    return not (is_drawn(row.sampling) and cuts_any(row.sampling)) and not closes_tokens(row)


def reports_of(
    indices: Iterable[int],
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    sources: Sequence[int],
    choice: TokenChoice,
) -> dict[int, TokenLogprobs]:
    """Returns the reports of those of these rows that have a token and ask for one."""
    asking = choice.left(index for index in indices if rows[index].sampling.logprobs is not None)
    if not asking:
        return {}
    (chosen,) = to_device([[choice.tokens[index] for index in asking]], logits.device)
    own_sources = [sources[index] for index in asking]
    reports = PendingReports(logits, [rows[index] for index in asking], own_sources, chosen.long())
    return dict(zip(asking, reports.read(), strict=True))
