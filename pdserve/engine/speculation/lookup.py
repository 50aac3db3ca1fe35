"""Guesses the next tokens of an answer from the request's own text.

Where the last tokens of prompt and answer have occurred before, what followed them there may follow again: in code that
is edited, JSON that is filled in, quotes, lists. The last three tokens are looked up, and the latest place where they
occur is the *source*. While the answer goes on as the source does, it stays the source, however long that is.

Each new token says whether the source was right, also where nothing was drafted: so what a draft is worth is known
before one is paid for. A guess is the better the longer the text that led to it.

Reading a token and guessing one take constant time, and an index has about 100 bytes for each token.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_MATCH = 3
"""So many tokens have to agree with a place for that to be a source."""
MOST_COMPARED = 16
"""The tokens before a source are compared so far, to say how long the text is that led to it."""
READ_AT_ONCE = 4096
"""A step reads at most so many tokens of one request. This takes about a millisecond."""

_LONG_MATCHES = (4, 8, 16)
"""A guess after a match of about as many tokens is about as good. These begin the next better kinds."""
_FIRST_RATES = (0.4, 0.6, 0.8, 0.9)
"""The share of right guesses that is assumed at first, by the kind of match."""
_FORGETS = 0.9
_ENGINE_FORGETS = 0.995
_WEIGHT = 2.0
_ENGINE_WEIGHT = 16.0


class GuessRates:
    """The share of guesses that were right, by the length of the match, with recent ones counting most."""

    __slots__ = ("_before", "_forgets", "_right", "_tried", "_weight")

    def __init__(self, before: GuessRates | None = None) -> None:
        """Until there are guesses enough, the rates are those of ``before``, or else assumed ones."""
        self._before = before
        self._forgets, self._weight = (_ENGINE_FORGETS, _ENGINE_WEIGHT) if before is None else (_FORGETS, _WEIGHT)
        kinds = len(_FIRST_RATES)
        self._right, self._tried = [0.0] * kinds, [0.0] * kinds

    def note(self, matched: int, right: bool) -> None:
        """Notes whether a guess after a match of so many tokens was right."""
        kind = _kind(matched)
        self._right[kind] = self._forgets * self._right[kind] + right
        self._tried[kind] = self._forgets * self._tried[kind] + 1
        if self._before is not None:
            self._before.note(matched, right)

    def rate(self, matched: int) -> float:
        """Returns the share of guesses after a match of so many tokens that are right, between 0 and 1."""
        return self._rate(_kind(matched))

    def _rate(self, kind: int) -> float:
        before = _FIRST_RATES[kind] if self._before is None else self._before._rate(kind)
        return (self._right[kind] + self._weight * before) / (self._tried[kind] + self._weight)


def _kind(matched: int) -> int:
    return sum(matched >= least for least in _LONG_MATCHES)


class OwnText:
    """The index of one request's tokens, which are only ever appended to, and the source of its next ones."""

    __slots__ = ("_last_place", "_num_read", "_source", "matched", "rates")

    def __init__(self, rates: GuessRates) -> None:
        """``rates`` are those of all requests of the engine."""
        self.rates = GuessRates(rates)
        self._last_place: dict[tuple[int, ...], int] = {}
        """The place behind the latest occurrence of each run of ``LEAST_MATCH`` tokens."""
        self._num_read = 0
        self._source: int | None = None
        """The place of the token that is guessed to come next; None if there is none."""
        self.matched = 0
        """The number of tokens before the source that are the last ones of the text, as far as that was looked at."""

    def read(self, tokens: Sequence[int], num_prompt_tokens: int) -> bool:
        """Reads what is new of ``tokens``, the prompt and the answer. Returns whether all is read.

        The rest is read in the next call.
        """
        if self._num_read < num_prompt_tokens - 1:
            # Only what leads to the answer's tokens tells how good guesses are.
            self._index(tokens, min(num_prompt_tokens - 1, self._num_read + READ_AT_ONCE))
            if self._num_read < num_prompt_tokens - 1:
                return False
        end = min(len(tokens), self._num_read + READ_AT_ONCE)
        for place in range(self._num_read, end):
            self._follow(tokens, place)
        self._num_read = end
        return end == len(tokens)

    def guesses(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns up to ``count`` tokens that are guessed to follow ``tokens``, all of which have been read."""
        if self._source is None or count <= 0:
            return []
        guessed = list(tokens[self._source : self._source + count])
        # A text that repeats its end goes on to do so.
        for place in range(len(guessed), count):
            guessed.append(guessed[place - (len(tokens) - self._source)])
        return guessed

    def _index(self, tokens: Sequence[int], end: int) -> None:
        first = max(0, self._num_read - LEAST_MATCH + 1)
        part = tokens[first:end]
        runs = zip(*(part[offset:] for offset in range(LEAST_MATCH)), strict=False)
        self._last_place.update(zip(runs, range(first + LEAST_MATCH, end + 1), strict=False))
        self._num_read = end

    def _follow(self, tokens: Sequence[int], place: int) -> None:
        """Reads the token at ``place``, and finds the source of the one behind it."""
        if self._source is not None:
            right = tokens[self._source] == tokens[place]
            self.rates.note(self.matched, right)
            self._source, self.matched = (self._source + 1, self.matched + 1) if right else (None, 0)
        end = place + 1
        if end < LEAST_MATCH:
            return
        run = tuple(tokens[end - LEAST_MATCH : end])
        if self._source is None and (found := self._last_place.get(run)) is not None:
            self._source, self.matched = found, _matched(tokens, found, end)
        self._last_place[run] = end


def _matched(tokens: Sequence[int], source: int, end: int) -> int:
    """Returns how many tokens before ``source`` and before ``end`` are the same, ``MOST_COMPARED`` at most."""
    count = LEAST_MATCH
    while count < min(MOST_COMPARED, source) and tokens[source - 1 - count] == tokens[end - 1 - count]:
        count += 1
    return count
