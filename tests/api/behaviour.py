"""The seed of a request chooses how the scripted engine answers it."""

from __future__ import annotations

import enum


class Behaviour(enum.IntEnum):
    """Choice ``i`` of a request has the seed + i, so the values lie apart where all choices should behave alike."""

    REPLY = 0
    """The engine sends ``REPLY_TEXT`` a token a step, then end-of-sequence, ``STOP``. So does any seed below 1,000."""
    ENDLESS = 1_000
    """The engine sends one token a step up to ``max_tokens``, then ``LENGTH``."""
    BURST = 2_000
    """The engine sends all of ``REPLY_TEXT`` and the end in one message."""
    HOLD = 3_000
    """The engine sends two tokens, then nothing until the request is aborted."""
    SILENT = 4_000
    """The engine sends nothing until the request is aborted."""
    ERROR = 5_000
    ERROR_LATE = 6_000
    """The engine sends two tokens, then an error."""
    DEADLINE = 7_000
    DEADLINE_LATE = 8_000
    FAIL = 9_000
    """The engine sends two tokens, then ``EngineFailed``, and exits."""
    DIE = 10_000
    """The engine sends two tokens and ends suddenly, with no further message."""
    SPLIT_CHARACTER = 11_000
    """The engine sends characters whose bytes lie in several tokens."""
    STOP_TOKEN = 12_000
    """The engine sends ``Hello`` and one more token, which it says is the stop token."""
    SLOW = 13_000
    """The engine sends two tokens, pauses, then sends the rest of ``REPLY_TEXT``."""
    GATED = 14_000
    """The engine sends two tokens, and the rest of ``REPLY_TEXT`` as soon as the test opens the gate."""

    @classmethod
    def of_seed(cls, seed: int) -> Behaviour:
        return cls(seed // 1_000 * 1_000) if seed < 15_000 else cls.REPLY


REPLY_TEXT = "Hello, world! How are you?"
SPLIT_TEXT = "漢字 👩‍👩‍👧 ok"
ENDLESS_TOKEN_TEXT = " word"
ENGINE_FAILURE = "the scripted engine ran out of luck"
