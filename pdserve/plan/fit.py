"""Finds the parts of a step's time that explain measured times best: least squares of relative errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.engine.placement.step_cost import StepParts
from pdserve.engine.scheduling.batch_plan import chunk_tokens
from pdserve.errors import PlanError

_PARTS = StepParts.__struct_fields__
_LEAST_S = 1e-7
"""No step and no token of a prompt takes less, however noisy the machine was."""
_PLACES, _OF_EACH = 20, 100
"""The quantiles of a spread, and those of each batch that it is made of."""
_LEAST_TIMES = 0.05
"""No step takes less of its mean. A client that reads late sees shorter gaps, which are none."""


@dataclass(frozen=True, slots=True)
class Observed:
    """How often a measured time has each part, and how long it was."""

    parts: tuple[float, ...]
    """In the order of the fields of ``StepParts``."""
    fronts: float
    """How often it has the cost of a request before and after the engine."""
    seconds: float


def decode_step(rows: int, context_tokens: float, seconds: float) -> Observed:
    """A step in which so many requests decode."""
    return _observed(seconds, batch=1, request=rows, context_token=context_tokens)


def mixed_step(rows: int, context_tokens: float, prompt_tokens: int, seconds: float) -> Observed:
    """Such a step with a whole prompt beside them."""
    return _observed(
        seconds, batch=1, request=rows, context_token=context_tokens, chunk_beside=1, prompt_token=prompt_tokens
    )


def lone_prompt(prompt_tokens: int, chunk: int, seconds: float) -> Observed:
    """The time to the first token of a request that finds nothing else, computed in chunks of ``chunk`` tokens."""
    chunks = chunks_of(prompt_tokens, chunk)
    read = sum(tokens * done for done, tokens in chunks)
    return _observed(seconds, 1.0, chunk_alone=len(chunks), prompt_token=prompt_tokens, prompt_token_read=read)


def lone_prompt_s(parts: StepParts, prompt_tokens: int, chunk: int) -> float:
    """Returns what the steps of such a request take."""
    return sum(parts.step_s(0, 0, tokens, done) for done, tokens in chunks_of(prompt_tokens, chunk))


def fixed_part(explained: Sequence[float], took: Sequence[float]) -> float:
    """Returns by how much all of some times are longer than what explains them, which grows.

    A machine that others use may have become slower by a factor since that was measured, so the factor is found as
    well, and the result is at the former pace. It is not negative. Where nothing shows a factor, all is fixed.
    """
    counts = np.column_stack([explained, np.ones(len(explained))]) / np.array(took)[:, None]
    factor, fixed_s = _least_squares(counts)
    return float(fixed_s / factor if factor else fixed_s)


def chunks_of(prompt_tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Returns the chunks of a prompt that is computed alone: the tokens before each, and its own."""
    done, found = 0, []
    while done < prompt_tokens:
        tokens = chunk_tokens(prompt_tokens - done, chunk)
        found.append((done, tokens))
        done += tokens
    return found


def _observed(seconds: float, fronts: float = 0.0, **counts: float) -> Observed:
    return Observed(tuple(float(counts.get(name, 0.0)) for name in _PARTS), fronts, seconds)


def fit(observed: Sequence[Observed], front_s: float | None = None) -> tuple[StepParts, float]:
    """Returns the parts, and the cost of a request besides its steps, which is given or found as well.

    None of them is negative. Raises PlanError if what was observed does not tell a part.
    """
    rows = [(*row.parts, row.fronts if front_s is None else 0.0) for row in observed]
    times = [row.seconds - (0.0 if front_s is None else row.fronts * front_s) for row in observed]
    if not all(seconds > 0 for seconds in times):
        raise PlanError("a request took no longer than its way to the engine and back; the machine is too noisy")
    counts = np.array(rows) / np.array(times)[:, None]
    told = (counts > 0).any(axis=0)
    if not told[:-1].all():
        missing = [name for name, known in zip(_PARTS, told[:-1], strict=True) if not known]
        raise PlanError(f"nothing was measured that tells what {', '.join(missing)} take")
    scale = np.where(told, np.abs(counts).max(axis=0), 1.0)
    found = _least_squares(counts / scale) / scale
    *values, front = (float(value) for value in found)
    parts = dict(zip(_PARTS, values, strict=True))
    for name in ("batch", "prompt_token"):
        parts[name] = max(parts[name], _LEAST_S)
    return StepParts(**parts), front if front_s is None else front_s


def _least_squares(counts: np.ndarray) -> np.ndarray:
    """Returns what is not negative and makes ``counts`` times it nearest to 1.

    The best answer leaves some parts at 0 and is the best one of the others, so each choice of parts is tried.
    """
    rows, width = counts.shape
    wanted, best, least = np.ones(rows), np.zeros(width), math.inf
    for chosen in itertools.product((False, True), repeat=width):
        kept = np.flatnonzero(chosen)
        found = np.zeros(width)
        found[kept] = np.linalg.lstsq(counts[:, kept], wanted, rcond=None)[0]
        error = float(np.sum((counts @ found - wanted) ** 2))
        if error < least and (found >= 0).all():
            best, least = found, error
    return best


def spread_of(batches: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns evenly spaced quantiles of ratios, each in the middle of its share, with a mean of 1.

    Each batch counts as much as another: the many gaps of large ones would hide by how much small ones differ.
    """
    if not batches:
        return (1.0,)
    evenly = np.concatenate([np.quantile(np.array(ratios), _middles(_OF_EACH)) for ratios in batches])
    found = np.quantile(evenly, _middles(_PLACES))
    found = np.maximum(found, _LEAST_TIMES * found.mean())
    return tuple(float(value) for value in found / found.mean())


def _middles(places: int) -> np.ndarray:
    middles: np.ndarray = (np.arange(places) + 0.5) / places
    return middles
