"""Learns from this engine's own steps what a step costs, as a function of what it computes.

The estimate is a sum of parts, none of which is negative: what any step with decoding requests takes, what each of them
and each token of their contexts adds, what a chunk of a prompt adds at all, alone or beside them, and what each of its
tokens and of the tokens that these read adds. Each step moves only the parts that it has. So a long time without
prompts leaves what is known of prompts as it is, and steps that are all alike do not blur how their parts compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PRIOR_TOKEN_S = 1e-3
"""The time of a prompt's token that is assumed before any was measured."""
MOST_TOKENS = 2**30
"""``prompt_tokens_within`` returns no more."""

_LEAST_TOKEN_S = 1e-7
_KEPT = 0.97
"""The weight of a step falls by so much with each later step of its kind."""
_KEPT_SHORT = 0.8
_OUTLIER = 3.0
"""A step counts as at most so many times its estimate: something else had the cores."""
_TRUSTED = 4
"""So many steps of a kind are taken as they are: the estimate is no measure yet."""
_SWEEPS = 2
_RESCALE = 1e12

_BATCH, _ROW, _CONTEXT, _ALONE, _BESIDE, _TOKEN, _READ = range(7)
_NAMES = ("batch", "request", "context_token", "chunk_alone", "chunk_beside", "prompt_token", "prompt_token_read")
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
        """The time of the last step with tokens of prompts."""
        self._parts = [0.0] * 7
        self._parts[_TOKEN] = PRIOR_TOKEN_S
        self._decoding = _Memory()
        self._prompts = _Memory()
        self._chunk_tokens = 0.0
        self._chunk_context = 0.0

    @property
    def known(self) -> bool:
        """Whether a step with tokens of prompts was measured."""
        return self._prompts.steps > 0

    @property
    def decoding_known(self) -> bool:
        """Whether a step that computed single tokens only was measured."""
        return self._decoding.steps > 0

    @property
    def tokens_per_s(self) -> float:
        """The prompt tokens a second of steps that compute nothing else, in chunks like those that were measured."""
        if not self.known:
            return 1 / PRIOR_TOKEN_S
        fixed_s, tokens = self._parts[_ALONE], self._chunk_tokens
        return tokens / (fixed_s + tokens * self._token_s(self._chunk_context))

    @property
    def parts(self) -> dict[str, float]:
        """The seconds that each part of a step takes."""
        return dict(zip(_NAMES, self._parts, strict=True))

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
        memory = self._prompts if prompt_tokens else self._decoding
        if prompt_tokens and not self.known:
            rest_s = seconds - min(self._decoding_s(rows, context_tokens), 0.75 * seconds)
            self._parts[_TOKEN] = max(_LEAST_TOKEN_S, rest_s / prompt_tokens)
        expected_s = self.estimate_s(rows, context_tokens, prompt_tokens, prompt_context=prompt_context)
        if memory.steps >= _TRUSTED:
            seconds = min(seconds, _OUTLIER * expected_s)
        memory.learn(features, seconds, expected_s if memory.steps else seconds)
        self._fit([part for part in _ORDER if features[part]])
        if prompt_tokens:
            self._note_chunk(prompt_tokens, prompt_context)
            self.measured_at = now
        if rows:
            self._note_decoding(self._decoding_s(rows, context_tokens) if prompt_tokens else seconds)

    def estimate_s(self, rows: int, context_tokens: int, prompt_tokens: int, *, prompt_context: float = 0.0) -> float:
        """Returns how long such a step takes. It takes no less with more of anything."""
        decoding_s = self._decoding_s(rows, context_tokens)
        if not prompt_tokens:
            return decoding_s
        fixed_s = max(self._parts[_ALONE], decoding_s + self._parts[_BESIDE]) if rows else self._parts[_ALONE]
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
        parts = self._parts
        return parts[_BATCH] + rows * parts[_ROW] + context_tokens * parts[_CONTEXT] if rows else 0.0

    def _token_s(self, prompt_context: float) -> float:
        return self._parts[_TOKEN] + prompt_context * self._parts[_READ]

    def _fit(self, moving: Sequence[int]) -> None:
        """Moves these parts, one after the other, to where the squared errors of remembered steps are least."""
        for _ in range(_SWEEPS):
            for part in moving:
                decoding, prompts = self._decoding, self._prompts
                curve = decoding.curve(part) + prompts.curve(part)
                if curve > 0:
                    pull = decoding.pull(part, self._parts) + prompts.pull(part, self._parts)
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


class _Memory:
    """The sums of which squared errors of steps of one kind are made: older steps weigh less."""

    def __init__(self) -> None:
        self.steps = 0
        self._weight = 1.0
        """The weight of the newest step. It grows instead of all the others falling."""
        self._products = [[0.0] * 7 for _ in range(7)]
        self._values = [0.0] * 7

    def learn(self, features: Sequence[float], seconds: float, unit: float) -> None:
        """Adds a step. Errors are counted in ``unit`` seconds, so that short steps count as much as long ones."""
        self.steps += 1
        self._weight /= _KEPT
        if self._weight > _RESCALE:
            self._products = [[value / self._weight for value in row] for row in self._products]
            self._values = [value / self._weight for value in self._values]
            self._weight = 1.0
        weight = self._weight / unit**2
        parts = [part for part in range(7) if features[part]]
        for part in parts:
            weighted, row = weight * features[part], self._products[part]
            self._values[part] += weighted * seconds
            for other in parts:
                row[other] += weighted * features[other]

    def curve(self, part: int) -> float:
        """Returns how fast the errors grow with the square of a change of this part."""
        return self._products[part][part] / self._weight

    def pull(self, part: int, parts: Sequence[float]) -> float:
        """Returns how fast the errors fall with a change of this part."""
        row = self._products[part]
        explained = sum(row[other] * parts[other] for other in range(7))
        return (self._values[part] - explained) / self._weight


def _features(rows: int, context_tokens: int, prompt_tokens: int, prompt_context: float) -> Sequence[float]:
    """Returns how often the step has each part."""
    decodes, chunk = float(rows > 0), float(prompt_tokens > 0)
    alone, beside = chunk * (1 - decodes), chunk * decodes
    context = decodes * context_tokens
    return (decodes, rows, context, alone, beside, prompt_tokens, prompt_tokens * prompt_context)
