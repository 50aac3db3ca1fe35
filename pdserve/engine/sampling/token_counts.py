"""Counts which tokens a request has, and how often, continued from step to step.

To count the tokens of a context anew for each token of each answer took a third of a second a step, with 64 answers of
32,768 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """The token counts of one request. Its tokens are only ever appended to."""

    __slots__ = ("_all", "_generated")

    def __init__(self) -> None:
        self._all: _CountedTokens | None = None
        self._generated: _CountedTokens | None = None

    def present(self, token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Returns each token of prompt and answer once. The array is valid until the next call."""
        if self._all is None:
            # A long prompt is read at once, in C: no parameter needs to know how often its tokens occur.
            self._all = _CountedTokens(dict.fromkeys(token_ids), len(token_ids))
        self._all.read(token_ids)
        return self._all.tokens

    def generated(
        self, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns each token of the answer once, and how often it occurs. The arrays are valid until the next call."""
        if self._generated is None:
            self._generated = _CountedTokens((), num_prompt_tokens)
        self._generated.read(token_ids)
        return self._generated.tokens, self._generated.times


class _CountedTokens:
    def __init__(self, tokens: Iterable[int], num_read: int) -> None:
        """``tokens`` are all different, and come from the ``num_read`` tokens that were read already."""
        self._tokens = np.fromiter(tokens, np.int64)
        self._times = np.ones(len(self._tokens), np.int64)
        self._place = {token: place for place, token in enumerate(self._tokens.tolist())}
        self._num_read = num_read

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self._tokens[: len(self._place)]

    @property
    def times(self) -> npt.NDArray[np.int64]:
        return self._times[: len(self._place)]

    def read(self, token_ids: Sequence[int]) -> None:
        for token in token_ids[self._num_read :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._tokens):
                self._tokens, self._times = _doubled(self._tokens), _doubled(self._times)
            self._tokens[place] = token
            self._times[place] += 1
        self._num_read = len(token_ids)


def _doubled(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the array at twice the length or more, with zeros at its end."""
    return np.concatenate([array, np.zeros(max(16, len(array)), np.int64)])
