"""Says what no simulation needs to find out: nodes too few for the tokens of a load, and an ITL that no node keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdserve.engine.placement.step_cost import StepParts
from pdserve.errors import PlanError
from pdserve.plan.fit import chunks_of
from pdserve.plan.load import PlannedRequest
from pdserve.plan.profile import CacheGeometry, Profile

_LEFT = 0.15
"""This share of the work may be left at the end although a cluster keeps up: it is under way."""
_CHANCE = 3.0
"""Chance may leave more of few requests: this divided by the square root of their number."""


def least_nodes(
    profile: Profile,
    load: Sequence[PlannedRequest],
    nodes_per_machine: int,
    itl_s: float = 0.0,
    percentile: float = 90.0,
) -> int:
    """Returns the least number of nodes of any kind whose steps could do the work of ``load`` while it comes.

    That holds for loads that come at one rate, as those that are drawn. A burst at the end of a trace may be computed
    afterwards: how many nodes it needs is up to the targets. The batches of the nodes are as full as the ITL target of
    ``itl_s`` (0 for none) and the KV cache allow. Raises PlanError.
    """
    seconds = load[-1].at_s - load[0].at_s
    share = 1 - _LEFT - _CHANCE / math.sqrt(len(load))
    if share <= 0 or not seconds:
        return 1
    speed, cache = profile.speed(nodes_per_machine), profile.cache
    # A node computes with all cores for one share of the time, or with its own all the time: each part is no less.
    parts = speed.steps.times(nodes_per_machine).least(speed.beside)
    longest_s = itl_s / speed.least_spread if itl_s else math.inf
    decoding_s = _decoding_s(parts, load, cache, longest_s, percentile / 100)
    prompts_s = sum(_prompt_s(parts, request.prompt_tokens, cache.max_num_batched_tokens) for request in load)
    return max(1, math.ceil(share * (decoding_s + prompts_s) / seconds))


def check_itl(
    profile: Profile, load: Sequence[PlannedRequest], nodes_per_machine: int, itl_s: float, percentile: float
) -> None:
    """Raises PlanError if a step of one request takes longer than the ITL target of ``itl_s`` (0 for none)."""
    contexts = [request.prompt_tokens + 1 for request in load if request.output_tokens > 1]
    if not itl_s or not contexts:
        return
    speed = profile.speed(nodes_per_machine)
    step_s = speed.steps.least(speed.beside).decoding_s(1, min(contexts))
    step_s *= min(_quantile(speed.spread_of(beside), percentile) for beside in (False, True))
    if step_s > itl_s:
        raise PlanError(
            f"no number of nodes keeps an ITL p{percentile:g} of {itl_s * 1e3:g} ms: a step for one request alone "
            f"takes {step_s * 1e3:.3g} ms. Want a longer ITL, or measure a faster machine"
        )


def _quantile(spread: Sequence[float], percentile: float) -> float:
    """Returns the least of the values that so many percent of them do not exceed."""
    return sorted(spread)[max(0, math.ceil(len(spread) * percentile / 100 - 1e-6) - 1)]


def _prompt_s(parts: StepParts, prompt_tokens: int, chunk: int) -> float:
    """Returns what a prompt adds to steps at least, where others share the rest of its last chunk."""
    fixed_s = min(parts.chunk_alone, parts.chunk_beside) * prompt_tokens / chunk
    return fixed_s + sum(tokens * parts.token_s(done) for done, tokens in chunks_of(prompt_tokens, chunk))


def _decoding_s(
    parts: StepParts, load: Sequence[PlannedRequest], cache: CacheGeometry, longest_s: float, share: float
) -> float:
    """Returns what the tokens after the first take at least, of which ``share`` come in steps of ``longest_s``."""
    tokens = sum(request.output_tokens - 1 for request in load)
    contexts = sum(
        (request.output_tokens - 1) * (request.prompt_tokens + request.output_tokens / 2) for request in load
    )
    rows = cache.max_num_seqs
    steps = max(tokens / rows, contexts / cache.room)
    if parts.decoding_s(rows, 0) > longest_s:
        rows_in_time = max(1.0, (longest_s - parts.batch) / max(parts.request, 1e-9))
        steps = max(steps, tokens * (share / rows_in_time + (1 - share) / rows))
    return steps * parts.batch + tokens * parts.request + contexts * parts.context_token
