"""What a client's request may ask for, and what a node does with its messages and answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdserve.config.declare import setting


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The answers that a node keeps for clients that ask again, after their proxy or their connection was lost.

    It keeps those whose requests have an idempotency key, or ask for the ids of events.
    """

    answers: int = setting(
        "keep-answers",
        "The node keeps at most this many answers for clients that ask again, and computes at most half of them for "
        "one absent client. 0 keeps none.",
        1024,
        minimum=0,
        maximum=100_000,
    )
    memory_mib: int = setting(
        "keep-answers-mib",
        "Kept answers take at most this much memory, in MiB, and one answer at most an eighth of it.",
        64,
        minimum=1,
        maximum=1_048_576,
    )
    keep_s: float = setting(
        "keep-answers-s",
        "An answer is computed on and kept for this many seconds after its client or its proxy was lost.",
        60.0,
        minimum=0.1,
        maximum=3600,
    )


class ToolFormat(enum.Enum):
    """The form in which a model writes tool calls."""

    AUTO = "auto"
    """The chat template says which one."""
    NONE = "none"
    """No calls are looked for."""
    HERMES = "hermes"
    QWEN_XML = "qwen-xml"
    LLAMA_JSON = "llama-json"
    PYTHONIC = "pythonic"
    MISTRAL = "mistral"
    NEMOTRON = "nemotron"
    GEMMA = "gemma"
    GEMMA4 = "gemma4"
    HARMONY = "harmony"


class ReasoningFormat(enum.Enum):
    """The form in which a model writes what it thinks before it answers."""

    AUTO = "auto"
    """The chat template says which one."""
    NONE = "none"
    """No reasoning is looked for."""
    THINK = "think"
    MISTRAL = "mistral"
    GEMMA4 = "gemma4"
    HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class MessageConfig:
    """How chat answers are taken apart."""

    tool_parser: ToolFormat = setting(
        "tool-parser",
        "The form in which tool calls are read. 'auto' sees it in the chat template, 'none' reads none.",
        ToolFormat.AUTO,
    )
    reasoning_parser: ReasoningFormat = setting(
        "reasoning-parser",
        "The form in which reasoning is read. 'auto' sees it in the chat template, 'none' leaves it in the content.",
        ReasoningFormat.AUTO,
    )


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """The limits of one client request."""

    timeout_s: float = setting(
        "request-timeout-s",
        "A whole request may take this many seconds.",
        600.0,
        minimum=0.1,
        maximum=86_400,
        first=True,
    )
