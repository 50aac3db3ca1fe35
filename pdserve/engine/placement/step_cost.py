"""Learns from this engine's own steps what a step costs, as a function of what it computes.

The estimate is a sum of parts, none of which is negative: what any step with decoding requests takes, what each of them
and each token of their contexts adds, what a chunk of a prompt adds at all, alone or beside them, and what each of its
tokens and of the tokens that these read adds. The parts are those that explain the remembered steps best. Each kind of
steps is remembered for itself, so that a thousand steps that are all alike do not blur how their parts compare. Since
the whole machine may become slower or faster, all parts are multiplied by its *pace*, which follows the last steps.
There are two of them: an engine that borrows its neighbours' cores is faster while these sleep.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from operator import mul
from statistics import fmean
from typing import Self

import msgspec

PRIOR_TOKEN_S = 1e-3
"""The time of a prompt's token that is assumed before any was measured."""
MOST_TOKENS = 2**30
"""``prompt_tokens_within`` returns no more."""

_LEAST_TOKEN_S = 1e-7
_KEPT = 0.97
"""The weight of a step falls by so much with each later step of its kind (of about as many requests and tokens)."""
_KEPT_OTHERS = 0.9995
"""The weight of a kind of steps falls by so much with each step of another kind."""
_MOST_STEPS = 32
"""A kind of steps has the weight of so many of them, at most."""
_PACE_SHARE = 0.05
"""So far the pace moves with each step to what that step says."""
_PACE_KEPT = 0.998
"""The pace falls back to 1 by this power with each step: what lasts is learned by the parts."""
_LEAST_SHARE = 1e-3
"""A step is not taken for one that was expected to take less than this share of its time, or nothing."""
_KEPT_SHORT = 0.8
_OUTLIER = 3.0
"""A step counts as at most so many times its estimate: something else had the cores."""
_TRUSTED = 4
"""So many steps of a kind are taken as they are: the estimate is no measure yet."""
_TELLING_TOKENS = 32
"""A chunk of fewer tokens takes the time of reading the weights, and says little about the rate of long ones."""
_SWEEPS = 2
_RESCALE = 1e3


class Times(msgspec.Struct, frozen=True):
    """Fields that are times in seconds, and nothing else."""

    def times(self, factor: float) -> Self:
        """Returns what takes ``factor`` times as long."""
        return type(self)(**{name: factor * getattr(self, name) for name in self.__struct_fields__})

    @classmethod
    def mean(cls, of: Sequence[Self]) -> Self:
        """Returns the mean of each field."""
        return cls(**{name: fmean(getattr(one, name) for one in of) for name in cls.__struct_fields__})


class StepParts(Times, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The seconds that each part of a step takes. None is negative.

    ``StepCost`` learns them while an engine serves, and ``pdserve.plan`` reads them from a profile.
    """

    batch: float
    """What any step takes in which requests decode."""
    request: float
    """What each of these requests adds."""
    context_token: float
    """What each token of their contexts adds."""
    chunk_alone: float
    """What a step with chunks of prompts, and nothing else, takes besides their tokens."""
    chunk_beside: float
    """What chunks add besides their tokens where requests decode."""
    prompt_token: float
    """What each token of a chunk adds."""
    prompt_token_read: float
    """What each token of a chunk adds for each token of its prompt before the chunk."""

    def decoding_s(self, rows: int, context_tokens: float) -> float:
        """Returns what a step takes in which so many requests decode, with so many tokens in their contexts."""
        return self.batch + rows * self.request + context_tokens * self.context_token if rows else 0.0

    def token_s(self, prompt_context: float) -> float:
        """Returns what a token of a chunk adds that has so many tokens of its prompt before it."""
        return self.prompt_token + prompt_context * self.prompt_token_read

    def step_s(self, rows: int, context_tokens: float, prompt_tokens: int, prompt_context: float = 0.0) -> float:
        """Returns what such a step takes. It takes no less with more of anything."""
        decoding_s = self.decoding_s(rows, context_tokens)
        if not prompt_tokens:
            return decoding_s
        fixed_s = max(self.chunk_alone, decoding_s + self.chunk_beside) if rows else self.chunk_alone
        return fixed_s + prompt_tokens * self.token_s(prompt_context)

    def least(self, other: StepParts) -> StepParts:
        """Returns the parts of a node whose every part takes as long as in the faster one of the two."""
        return StepParts(**{name: min(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__})


_BATCH, _ROW, _CONTEXT, _ALONE, _BESIDE, _TOKEN, _READ = range(7)
_ALL = range(7)
_DECODING = (_BATCH, _ROW, _CONTEXT)
_PROMPTS = (_ALONE, _TOKEN, _READ)
_NAMES = StepParts.__struct_fields__
_ORDER = (_ALONE, _BESIDE, _TOKEN, _READ, _BATCH, _ROW, _CONTEXT)
"""What a chunk adds at all moves before what its tokens add: an estimate of that which is too high makes chunks small,
and these correct it. The other way round it would confirm itself."""


class StepCost:
    """Running estimates of this engine's steps. The class has no clock; times are in seconds.

    A step has ``rows`` requests of which it computes a single token, which read ``context_tokens`` tokens together, and
    ``prompt_tokens`` tokens in chunks of prompts. ``prompt_context`` is the number of tokens of the same prompt before
    such a chunk; of several chunks, the mean over their tokens.
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        """The mean of what recent steps took, or would have taken without prompts; 0 before the first of them."""
        self.measured_at = -math.inf
        """The time of the last step with a long chunk of a prompt."""
        self.spread = 0.0
        """By how much of its estimate a step differs from it lately, on average."""
        self._parts = [0.0] * 7
        self._parts[_TOKEN] = PRIOR_TOKEN_S
        self._memory = _Memory()
        self.borrowing = False
        """Whether steps are computed on other engines' cores, too. The caller says so when it changes."""
        self._paces = {False: 1.0, True: 1.0}
        """What recent steps took, without borrowed cores and with them, as a multiple of what their parts took over a
        long time."""
        self._prompt_steps = 0
        self._decode_steps = 0
        self._chunk_tokens = 0.0
        self._chunk_context = 0.0

    @classmethod
    def of(cls, parts: StepParts, chunk_tokens: int, spread: float = 0.0) -> StepCost:
        """Returns the estimates of an engine that has learnt these parts, from chunks of ``chunk_tokens``."""
        cost = cls()
        cost._parts = list(msgspec.structs.astuple(parts))
        cost._prompt_steps = cost._decode_steps = _TRUSTED
        cost._chunk_tokens = chunk_tokens
        cost.decode_step_s = parts.decoding_s(1, chunk_tokens)
        cost.measured_at, cost.spread = math.inf, spread
        return cost

    def copy(self) -> StepCost:
        """Returns the same estimates, which go on learning for themselves."""
        cost = copy.copy(self)
        cost._parts, cost._paces, cost._memory = list(self._parts), dict(self._paces), self._memory.copy()
        return cost

    @property
    def _pace(self) -> float:
        return self._paces[self.borrowing]

    @property
    def known(self) -> bool:
        """Whether a step with tokens of prompts was measured."""
        return self._prompt_steps > 0

    @property
    def rate_known(self) -> bool:
        """Whether a chunk was measured that is long enough to tell a rate."""
        return self._chunk_tokens > 0

    @property
    def decoding_known(self) -> bool:
        """Whether a step that computed single tokens only was measured."""
        return self._decode_steps > 0

    @property
    def tokens_per_s(self) -> float:
        """The prompt tokens a second of steps that compute nothing else, in long chunks like the measured ones."""
        if not self.rate_known:
            return 1 / PRIOR_TOKEN_S
        fixed_s, tokens = self._pace * self._parts[_ALONE], self._chunk_tokens
        return tokens / (fixed_s + tokens * self._token_s(self._chunk_context))

    def tokens_per_s_beside(self, rows: int, context_tokens: int, chunk_tokens: int) -> float:
        """Returns the prompt tokens a second of steps with such chunks beside ``rows``, which make none faster."""
        if not rows:
            return self.tokens_per_s
        step_s = self.estimate_s(rows, context_tokens, chunk_tokens, prompt_context=self._chunk_context)
        return min(self.tokens_per_s, chunk_tokens / step_s)

    @property
    def parts(self) -> dict[str, float]:
        """The seconds that each part of a step takes."""
        return {name: self._pace * part for name, part in zip(_NAMES, self._parts, strict=True)}

    def observe(
        self,
        rows: int,
        context_tokens: int,
        prompt_tokens: int,
        seconds: float,
        *,
        prompt_context: float = 0.0,
        now: float = 0.0,
    ) -> None:
        """Learns that such a step took ``seconds`` and ended at ``now``."""
        if not 0 < seconds < math.inf or not (rows or prompt_tokens):
            return
        features = _features(rows, context_tokens, prompt_tokens, prompt_context)
        if prompt_tokens and not self.known:
            rest_s = seconds - min(self._decoding_s(rows, context_tokens), 0.75 * seconds)
            self._parts[_TOKEN] = max(_LEAST_TOKEN_S, rest_s / self._pace / prompt_tokens)
        expected_s = self.estimate_s(rows, context_tokens, prompt_tokens, prompt_context=prompt_context)
        expected_s = max(expected_s, _LEAST_SHARE * seconds)
        trusted = (self._prompt_steps if prompt_tokens else self._decode_steps) >= _TRUSTED
        if trusted:
            seconds = min(seconds, _OUTLIER * expected_s)
        steady_s = seconds / self._pace
        self._memory.learn(
            (rows.bit_length(), prompt_tokens.bit_length()),
            features,
            steady_s,
            expected_s / self._pace if trusted else steady_s,
        )
        if trusted:
            error = max(seconds / expected_s, 1 / _OUTLIER) - 1
            self._paces[self.borrowing] = self._pace**_PACE_KEPT * (1 + _PACE_SHARE * error)
            self.spread += _PACE_SHARE * (abs(error) - self.spread)
        self._fit([part for part in _ORDER if features[part]])
        if prompt_tokens:
            self._prompt_steps += 1
            if prompt_tokens >= _TELLING_TOKENS:
                self._note_chunk(prompt_tokens, prompt_context)
                self.measured_at = now
        else:
            self._decode_steps += 1
        if rows:
            self._note_decoding(self._decoding_s(rows, context_tokens) if prompt_tokens else seconds)

    def estimate_s(self, rows: int, context_tokens: int, prompt_tokens: int, *, prompt_context: float = 0.0) -> float:
        """Returns how long such a step takes. It takes no less with more of anything."""
        decoding_s = self._decoding_s(rows, context_tokens)
        if not prompt_tokens:
            return decoding_s
        fixed_s = self._pace * self._parts[_ALONE]
        if rows:
            fixed_s = max(fixed_s, decoding_s + self._pace * self._parts[_BESIDE])
        return fixed_s + prompt_tokens * self._token_s(prompt_context)

    def prompt_s(self, prompt_tokens: int, prompt_context: float = 0.0) -> float:
        """Returns what so many more tokens of a prompt add to a step that has a chunk."""
        return prompt_tokens * self._token_s(prompt_context)

    def prompt_tokens_within(
        self, seconds: float, rows: int, context_tokens: int, *, prompt_context: float = 0.0
    ) -> int:
        """Returns how many tokens of a prompt fit into a step beside ``rows``, so that it takes at most ``seconds``."""
        spare_s = seconds - self.estimate_s(rows, context_tokens, 1, prompt_context=prompt_context)
        if spare_s < 0:
            return 0
        return int(min(MOST_TOKENS, 1 + spare_s / self._token_s(prompt_context)))

    def _decoding_s(self, rows: int, context_tokens: int) -> float:
        if not rows:
            return 0.0
        parts = self._parts
        return self._pace * (parts[_BATCH] + rows * parts[_ROW] + context_tokens * parts[_CONTEXT])

    def _token_s(self, prompt_context: float) -> float:
        return self._pace * (self._parts[_TOKEN] + prompt_context * self._parts[_READ])

    def _fit(self, moving: Sequence[int]) -> None:
        """Moves these parts, one after the other, to where the squared errors of remembered steps are least."""
        for _ in range(_SWEEPS):
            for part in moving:
                curve = self._memory.curve(part)
                if curve > 0:
                    pull = self._memory.pull(part, self._parts)
                    least = _LEAST_TOKEN_S if part == _TOKEN else 0.0
                    self._parts[part] = max(least, self._parts[part] + pull / curve)

    def _note_chunk(self, tokens: int, context: float) -> None:
        """Moves the means of chunks' sizes and of what is before them. A chunk counts by its tokens."""
        share = 1.0 if not self._chunk_tokens else tokens / (tokens + 4 * self._chunk_tokens)
        self._chunk_tokens += share * (tokens - self._chunk_tokens)
        self._chunk_context += share * (context - self._chunk_context)

    def _note_decoding(self, seconds: float) -> None:
        before_s = self.decode_step_s or seconds
        self.decode_step_s = _KEPT_SHORT * before_s + (1 - _KEPT_SHORT) * seconds


class _Kind:
    """The means of what steps of one kind have given."""

    def __init__(self) -> None:
        self.steps = 0
        self.weight = 0.0
        """The weight with which the means are in the sums of all kinds."""
        self.products = [[0.0] * 7 for _ in range(7)]
        self.values = [0.0] * 7

    def copy(self) -> _Kind:
        kind = copy.copy(self)
        kind.products, kind.values = [list(row) for row in self.products], list(self.values)
        return kind


class _Memory:
    """The sums of which squared errors of steps are made. Kinds of steps that come often do not push others out."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._weight = 1.0
        """The weight of the newest step. It grows instead of all the others falling."""
        self._products = [[0.0] * 7 for _ in range(7)]
        self._values = [0.0] * 7

    def copy(self) -> _Memory:
        memory = copy.copy(self)
        memory._kinds = {name: kind.copy() for name, kind in self._kinds.items()}
        memory._products, memory._values = [list(row) for row in self._products], list(self._values)
        return memory

    def learn(self, kind: tuple[int, int], features: Sequence[float], seconds: float, unit: float) -> None:
        """Adds a step. Errors are counted in ``unit`` seconds, so that short steps count as much as long ones."""
        self._weight /= _KEPT_OTHERS
        if self._weight > _RESCALE:
            self._rescale()
        means = self._kinds.get(kind)
        if means is None:
            means = self._kinds[kind] = _Kind()
        before = means.weight
        means.steps += 1
        means.weight = after = self._weight * min(means.steps, _MOST_STEPS)
        share, scale = max(1 / means.steps, 1 - _KEPT), unit**-2
        parts = _DECODING if not kind[1] else _ALL if kind[0] else _PROMPTS
        for part in parts:
            weighted = scale * features[part]
            old, row, sums = means.values[part], means.products[part], self._products[part]
            means.values[part] = new = old + share * (weighted * seconds - old)
            self._values[part] += after * new - before * old
            for other in parts:
                old = row[other]
                row[other] = new = old + share * (weighted * features[other] - old)
                sums[other] += after * new - before * old

    def curve(self, part: int) -> float:
        """Returns how fast the errors grow with the square of a change of this part."""
        return self._products[part][part]

    def pull(self, part: int, parts: Sequence[float]) -> float:
        """Returns how fast the errors fall with a change of this part."""
        pushed: float = sum(map(mul, self._products[part], parts))
        return self._values[part] - pushed

    def _rescale(self) -> None:
        """Adds all sums up anew, with smaller weights."""
        self._products = [[0.0] * 7 for _ in range(7)]
        self._values = [0.0] * 7
        for means in self._kinds.values():
            means.weight /= self._weight
            for part in range(7):
                self._values[part] += means.weight * means.values[part]
                for other in range(7):
                    self._products[part][other] += means.weight * means.products[part][other]
        self._weight = 1.0


def _features(rows: int, context_tokens: int, prompt_tokens: int, prompt_context: float) -> Sequence[float]:
    """Returns how often the step has each part."""
    decodes, chunk = float(rows > 0), float(prompt_tokens > 0)
    alone, beside = chunk * (1 - decodes), chunk * decodes
    context = decodes * context_tokens
    return (decodes, rows, context, alone, beside, prompt_tokens, prompt_tokens * prompt_context)
