"""How the next token of a request is chosen, in the form that every process of the cluster shares."""

from __future__ import annotations

from typing import Annotated

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Validated at the API; the engine trusts it.

    ``seed`` is always set (the API draws one where the client gave none), so that the random choice is a function of
    the request alone: not of its batch mates, nor of which node samples it.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0 is no limit."""
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Generate past end-of-sequence ids; ``stop_token_ids`` still stop."""
