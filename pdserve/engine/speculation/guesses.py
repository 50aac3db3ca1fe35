"""Guesses the next tokens of an answer, and says how likely each guess is right.

From the request's own text: where the last tokens of prompt and answer have occurred before, what followed them there
may follow again: in code that is edited, JSON that is filled in, quotes, lists. The last two tokens are looked up, and
the latest place where they occur is the *source*. Where they never occurred together, the last one alone is looked up.
While the answer goes on as the source does, it stays the source, however long that is. Each new token says whether the
source was right, also where nothing was drafted: so what a draft is worth is known before one is paid for. A guess is
the better the longer the text that led to it.

Reading a token and guessing one take constant time, and an index has less than 300 bytes for each token. All answers
to one prompt share the index of that.

By a model: the model's own MTP layers draft tokens, or a smaller model does, and each new token says which of them were
right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from pdserve.config import SchedulerConfig, Speculate

LOOKED_UP = 2
"""So many of the last tokens are looked up, and one alone where they never occurred together."""
MOST_COMPARED = 16
"""The tokens before a source are compared so far, to say how long the text is that led to it."""
READ_AT_ONCE = 4096
"""A step reads at most so many tokens, of all its requests together. Of prompts, this takes about a millisecond."""
MOST_INDEXED = 2**15
"""Only the end of a longer prompt is looked up."""

_LONG_MATCHES = (LOOKED_UP, 4, 8, 16)
"""A guess after a match of about as many tokens is about as good. These begin the next better kinds."""
FIRST_RATES = (0.2, 0.4, 0.6, 0.8, 0.9)
"""The share of right guesses that is assumed at first, by the kind of match."""

_FIRST_RATE = 0.7
_FALLS = 0.85
"""At first, each draft is assumed to be right so many times as often as the one before it."""

_FORGETS = 0.9
_ENGINE_FORGETS = 0.995
_WEIGHT = 2.0
_ENGINE_WEIGHT = 16.0


class Guesser(Protocol):
    """What guesses the tokens behind those of one request."""

    def guesses(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to ``count`` tokens that are guessed to follow ``tokens``, all of the request."""

    def rate(self, number: int = 0) -> float:
        """Returns how likely the guess after ``number`` right ones is right."""


class Rates:
    """The shares of guesses that were right, by their kind; recent ones count most.

    They are those of one engine, or of one request, which begins with those of its engine.
    """

    __slots__ = ("_engine", "_first", "_forgets", "_right", "_tried", "_weight")

    def __init__(self, first: Sequence[float], engine: Rates | None = None) -> None:
        """``first`` are the rates of each kind that are assumed before there was a guess."""
        self._first, self._engine = first, engine
        self._forgets, self._weight = (_ENGINE_FORGETS, _ENGINE_WEIGHT) if engine is None else (_FORGETS, _WEIGHT)
        self._right, self._tried = [0.0] * len(first), [0.0] * len(first)

    def of_request(self) -> Rates:
        """Returns the rates of a new request. What it notes is noted here, too."""
        return Rates(self._first, self)

    def note(self, kind: int, right: bool) -> None:
        """Notes whether a guess was right."""
        self._right[kind] = self._forgets * self._right[kind] + right
        self._tried[kind] = self._forgets * self._tried[kind] + 1
        if self._engine is not None:
            self._engine.note(kind, right)

    def rate(self, kind: int) -> float:
        """Returns the share of guesses of a kind that are right, between 0 and 1."""
        before = self._first[kind] if self._engine is None else self._engine.rate(kind)
        return (self._right[kind] + self._weight * before) / (self._tried[kind] + self._weight)


Run: TypeAlias = int | tuple[int, ...]
"""What is looked up: a token, or a run of several."""


def _kind(matched: int) -> int:
    return sum(matched >= least for least in _LONG_MATCHES)


class PromptText:
    """The index of the end of a prompt, without its last token."""

    __slots__ = ("_num_read", "last_place")

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_read = max(0, num_prompt_tokens - 1 - MOST_INDEXED)
        self.last_place: dict[Run, int] = {}
        """The place behind the latest occurrence of each token, and of each run of ``LOOKED_UP`` tokens."""

    def num_unread(self, num_prompt_tokens: int) -> int:
        return num_prompt_tokens - 1 - self._num_read

    def read(self, tokens: Sequence[int], count: int) -> None:
        """Reads the next ``count`` tokens of a prompt."""
        start, end = self._num_read, self._num_read + count
        first = max(0, start - LOOKED_UP + 1)
        part = tokens[first:end]
        runs = zip(*(part[offset:] for offset in range(LOOKED_UP)), strict=False)
        self.last_place.update(zip(runs, range(first + LOOKED_UP, end + 1), strict=False))
        self.last_place.update(zip(part[start - first :], range(start + 1, end + 1), strict=True))
        self._num_read = end


class OwnText:
    """The index of one request's tokens, which are only ever appended to, and the source of its next ones."""

    __slots__ = ("_last_place", "_num_read", "_rates", "_source", "matched", "prompt")

    def __init__(self, rates: Rates, prompt: PromptText) -> None:
        """``rates`` are those of the engine, by kinds of matches (``FIRST_RATES``)."""
        self._rates, self.prompt = rates.of_request(), prompt
        self._last_place: dict[Run, int] = {}
        """As that of the prompt, of what ends behind it."""
        self._num_read = 0
        self._source: int | None = None
        """The place of the token that is guessed to come next; None if there is none."""
        self.matched = 0
        """The number of tokens before the source that are the last ones of the text, as far as that was looked at."""

    def read(self, tokens: Sequence[int], num_prompt_tokens: int, most: int) -> int:
        """Reads what is new of ``tokens``, the prompt and the answer, ``most`` of them. Returns how many it has read.

        The rest is read in the next call: what is guessed before counts for nothing (``matched`` is 0).
        """
        of_prompt = max(0, min(most, self.prompt.num_unread(num_prompt_tokens)))
        if of_prompt:
            self.prompt.read(tokens, of_prompt)
        if self.prompt.num_unread(num_prompt_tokens) > 0:
            return of_prompt
        # Only what leads to the answer's tokens tells how good guesses are.
        start = max(self._num_read, num_prompt_tokens - 1)
        end = min(len(tokens), start + most - of_prompt)
        for place in range(start, end):
            self._follow(tokens, place)
        self._num_read = end
        if end < len(tokens):
            self._source, self.matched = None, 0
        return of_prompt + end - start

    def rate(self, number: int = 0) -> float:
        """Returns how likely the guess after ``number`` right ones is right."""
        return self._rates.rate(_kind(self.matched + number))

    def guesses(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns up to ``count`` tokens that are guessed to follow ``tokens``, all of which have been read."""
        if self._source is None or count <= 0:
            return []
        guessed = list(tokens[self._source : self._source + count])
        # A text that repeats its end goes on to do so.
        for place in range(len(guessed), count):
            guessed.append(guessed[place - (len(tokens) - self._source)])
        return guessed

    def _follow(self, tokens: Sequence[int], place: int) -> None:
        """Reads the token at ``place``, and finds the source of the one behind it."""
        if self._source is not None:
            right = tokens[self._source] == tokens[place]
            self._rates.note(_kind(self.matched), right)
            self._source, self.matched = (self._source + 1, self.matched + 1) if right else (None, 0)
        end = place + 1
        runs: list[Run] = [tokens[place]] if end < LOOKED_UP else [tuple(tokens[end - LOOKED_UP : end]), tokens[place]]
        for run in runs if self._source is None else ():
            found = self._last_place.get(run) or self.prompt.last_place.get(run)
            if found is not None:
                self._source, self.matched = found, _matched(tokens, found, end)
                break
        for run in runs:
            self._last_place[run] = end


def _matched(tokens: Sequence[int], source: int, end: int) -> int:
    """Returns how many tokens before ``source`` and before ``end`` are the same, ``MOST_COMPARED`` at most."""
    count = 1
    while count < min(MOST_COMPARED, source) and tokens[source - 1 - count] == tokens[end - 1 - count]:
        count += 1
    return count


def by_model(config: SchedulerConfig, has_layer: bool) -> bool:
    """Returns whether an engine has the model's own layer draft tokens, which may have one or not.

    Where the layer is asked for, and the files have none, the model is not loaded.
    """
    chosen = config.speculates is Speculate.AUTO and has_layer and not config.used_draft_model
    return config.speculates is Speculate.MTP or chosen


def first_rates(most_drafts: int) -> tuple[float, ...]:
    """Returns the rates that are assumed at first, by the place among the drafts of a step."""
    return tuple(_FIRST_RATE * _FALLS**place for place in range(most_drafts))


class ModelDrafts:
    """The latest drafts of one request."""

    __slots__ = ("_at", "_drafts", "_rates")

    def __init__(self, rates: Rates) -> None:
        """``rates`` are those of the engine, by place (``first_rates``)."""
        self._rates = rates.of_request()
        self._at = 0
        self._drafts: Sequence[int] = ()

    def put(self, at: int, drafts: Sequence[int]) -> None:
        """Takes what may follow the first ``at`` tokens of the request."""
        self._at, self._drafts = at, drafts

    def read(self, tokens: Sequence[int]) -> None:
        """Compares drafts with the tokens that have come since, and drops them if any has."""
        known = tokens[self._at : self._at + len(self._drafts)]
        for place, token in enumerate(known):
            right = self._drafts[place] == token
            self._rates.note(place, right)
            if not right:
                break
        if known:
            self._drafts = ()

    def guesses(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to ``count`` tokens that are guessed to follow ``tokens``."""
        return self._drafts[:count] if self._at == len(tokens) else ()

    def rate(self, number: int = 0) -> float:
        """Returns how likely the draft after ``number`` right ones is right."""
        return self._rates.rate(number)
