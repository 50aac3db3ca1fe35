"""Keeps the share of guesses that were right, by their kind, with recent ones counting most."""

from __future__ import annotations

from collections.abc import Sequence

_FORGETS = 0.9
_ENGINE_FORGETS = 0.995
_WEIGHT = 2.0
_ENGINE_WEIGHT = 16.0


class Rates:
    """The rates of one engine, or of one request, which begins with those of its engine."""

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
