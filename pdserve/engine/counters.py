"""What a scheduler has done."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.wire.engine import PrefillSource


@dataclass(slots=True)
class Counters:
    """Since the engine's start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens of admitted prompts."""
    prefix_cache_hits: int = 0
    """Those of them that were in the prefix cache."""
    prefills: dict[PrefillSource, int] = field(default_factory=lambda: dict.fromkeys(PrefillSource, 0))
