"""Says how the next token of a request is chosen, in the form that every process of the cluster shares."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.wire.grammar import Grammar


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of a request. The API validates them, and the engine trusts them.

    ``seed`` is always set (the API draws one if the client gave none), so that the random choice is a function of the
    request alone. It depends neither on the other requests of the batch nor on the node that samples.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 1.0
    """The divisor of the logits; 0 means greedy sampling."""
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of likeliest tokens among which one is chosen; 0 means no limit."""
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """The ids that end the answer besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Whether the answer goes on after end-of-sequence ids. ``stop_token_ids`` end it in any case."""
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """No token that would end the answer can be chosen before this many tokens are generated."""
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """The number subtracted from the logit of every token that the answer contains already."""
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """The number subtracted from a token's logit once for each time that the answer contains it."""
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    """It divides positive logits of tokens in prompt or answer, and multiplies negative ones (Keskar et al., 2019)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the number added to its logit. No id occurs twice."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only ids that can be chosen; empty means all. This prevails over ``min_tokens`` and ``bad_words``."""
    bad_words: tuple[Annotated[tuple[int, ...], msgspec.Meta(min_length=1)], ...] = ()
    """Sequences of tokens that the answer must not contain: the last one cannot be chosen after the others."""
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The number of likeliest tokens to report beside each chosen one; None reports no log probabilities."""
    logprob_token_ids: tuple[int, ...] = ()
    """The ids that are reported beside each chosen token instead of the likeliest; empty means the likeliest."""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The number of likeliest tokens to report beside each token of the prompt; None reports none of them."""
    grammar: Grammar | None = None
    """The texts that the answer may be; None is any text."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities by the model's own distribution, before penalties, bias and temperature."""

    chosen: float
    rank: int
    """The rank of the chosen token by probability; 1 is the likeliest."""
    top: tuple[tuple[int, float], ...]
    """Pairs of token id and log probability: of the likeliest tokens, or those of ``SamplingParams.logprob_token_ids``.
    The likeliest comes first."""


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One token that the sampler has chosen."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """The log probabilities, if ``SamplingParams.logprobs`` asks for them."""
