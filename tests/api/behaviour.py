"""How the scripted engine answers a request: chosen by the request's seed."""

from __future__ import annotations

import enum


class Behaviour(enum.IntEnum):
    """Choice ``i`` of a request has seed + i, so the values lie apart where choices should behave alike."""

    REPLY = 0
    """``REPLY_TEXT`` a token a step, then end-of-sequence, ``STOP``. Any seed below 1,000 does the same."""
    ENDLESS = 1_000
    """One token a step up to ``max_tokens``, then ``LENGTH``."""
    BURST = 2_000
    """All of ``REPLY_TEXT`` and the end in one message."""
    HOLD = 3_000
    """Two tokens, then nothing until aborted."""
    SILENT = 4_000
    """Nothing until aborted."""
    ERROR = 5_000
    ERROR_LATE = 6_000
    """Two tokens, then an error."""
    DEADLINE = 7_000
    DEADLINE_LATE = 8_000
    FAIL = 9_000
    """Two tokens, then ``EngineFailed`` and exit."""
    DIE = 10_000
    """Two tokens, then a sudden end without a word."""
    SPLIT_CHARACTER = 11_000
    """Characters whose bytes lie in several tokens."""
    STOP_TOKEN = 12_000
    """``Hello`` and one more token, which is told to be the stop token."""
    SLOW = 13_000
    """Two tokens, a pause, then the rest of ``REPLY_TEXT``."""
    GATED = 14_000
    """Two tokens, then, as soon as the test opens the gate, the rest of ``REPLY_TEXT``."""

    @classmethod
    def of_seed(cls, seed: int) -> Behaviour:
        return cls(seed // 1_000 * 1_000) if seed < 15_000 else cls.REPLY


REPLY_TEXT = "Hello, world! How are you?"
SPLIT_TEXT = "漢字 👩‍👩‍👧 ok"
ENDLESS_TOKEN_TEXT = " word"
ENGINE_FAILURE = "the scripted engine ran out of luck"
