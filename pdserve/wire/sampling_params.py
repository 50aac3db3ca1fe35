"""How the next token of a request is chosen, in the form that every process of the cluster shares."""

from __future__ import annotations

from typing import Annotated

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
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
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Until so many are generated, nothing that would stop can be chosen."""
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """Taken from the logit of every token that the answer holds already."""
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """Taken from a token's logit once for each time that the answer holds it."""
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """Divides positive logits of tokens in prompt or answer, multiplies negative ones (Keskar et al., 2019)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these token ids; none of them twice."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these can be chosen; empty means all. Stronger than ``min_tokens`` and ``bad_words``."""
    bad_words: tuple[Annotated[tuple[int, ...], msgspec.Meta(min_length=1)], ...] = ()
    """Runs of tokens that the answer must not hold: the last one cannot be chosen after the others."""
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How many of the most likely tokens to report beside each chosen one; None reports no log probabilities."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities, of the model's own distribution: before penalties, bias and temperature."""

    chosen: float
    rank: int
    """Of the chosen token: 1 is the most likely."""
    top: tuple[tuple[int, float], ...]
    """``(token id, log probability)``, most likely first."""


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One choice of the sampler."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """If ``SamplingParams.logprobs`` asks for them."""
