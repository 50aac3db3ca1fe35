"""Says how the next token of a request is chosen, in the form that every process of the cluster shares.

A ``Grammar`` bounds the answer's text: with a grammar, an answer that ends with ``FinishReason.STOP`` is a text of that
grammar, and one that ends with ``LENGTH`` is the beginning of one. The API makes grammars out of the fields of a
request: ``JSON_SCHEMA`` out of ``response_format``, for instance. Forced tool calls are ``LARK``, which holds the
schemas of their arguments. The API has compiled a grammar before it sends it, so a grammar that does not compile is the
client's error and never reaches an engine.

``PromptLogprobs`` are packed as arrays of numbers. A prompt may have a hundred thousand tokens: as arrays they cost the
step loop and the transfer thread no time for each token, and they keep every bit of what the model gave.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec

MAX_GRAMMAR_BYTES = 2**18
"""No setting allows a longer grammar: with the longest prompt it has to fit into a frame."""

JSON_WHITESPACE = r"[ ]|\n[ \t]{0,64}"
"""What may stand between the parts of JSON: nothing, a space, or a line's end and an indentation. With any number of
spaces, a model that has nothing to say would write spaces until its answer is full."""


class GrammarKind(enum.Enum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON."""
    REGEX = "regex"
    """A regular expression of the whole answer, in Rust's syntax, which has neither backreferences nor lookaround."""
    LARK = "lark"
    """A context-free grammar in llguidance's variant of Lark. Its first rule is named ``start``."""


STRUCTURE = "structure"
"""The name under which the rules before a grammar refer to it, with an ``@``."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The grammar of an answer."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_BYTES)]
    before: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_BYTES)] = ""
    """Rules in Lark of the complete answer, of which the grammar is the part ``@structure``; empty if it is all."""


class GrammarTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks the process that tries grammars whether this one compiles."""

    grammar: Grammar
    ebnf: bool = False
    """Whether the grammar, of the kind ``LARK``, may be in GBNF instead, to be written anew in Lark."""


class TriedGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a trial. The grammar compiles if there is no ``refusal``."""

    grammar: Grammar
    """The grammar, in Lark if it was in GBNF, with what the trial has left out of its schemas."""
    refusal: str = ""
    place: str = ""
    """The part of a JSON Schema that is at fault, as in ``properties.name``; empty if that is not known."""


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


NUMBER_BYTES = 4
MAX_SENT_BYTES = 3 * 2**20
"""How many bytes of log probabilities one message between hosts carries. They fit into a frame."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities by the model's own distribution, of some tokens that follow each other.

    The first token of a prompt has none. All numbers are little-endian and have four bytes.
    """

    top_count: Annotated[int, msgspec.Meta(ge=0)]
    """How many of the likeliest tokens each token has beside it."""
    chosen: bytes
    """A floating-point number for each token."""
    ranks: bytes
    """An integer for each token: its rank by probability, where 1 is the likeliest."""
    top_ids: bytes
    """The ids of the likeliest tokens, ``top_count`` for each token, the likeliest first."""
    top_logprobs: bytes
    """The floating-point numbers of ``top_ids``."""

    @property
    def num_tokens(self) -> int:
        return len(self.chosen) // NUMBER_BYTES

    def fits(self, num_tokens: int, top_count: int) -> bool:
        """Returns whether this has numbers for so many tokens, and for so many of the likeliest beside each."""
        tokens, top = num_tokens * NUMBER_BYTES, num_tokens * top_count * NUMBER_BYTES
        lengths = (len(self.chosen), len(self.ranks), len(self.top_ids), len(self.top_logprobs))
        return self.top_count == top_count and lengths == (tokens, tokens, top, top)

    def tokens(self, start: int, end: int) -> list[TokenLogprobs]:
        """Returns what is known of the tokens from ``start`` to ``end``, as far as there are so many."""
        end, count = min(end, self.num_tokens), self.top_count
        chosen, ranks = _floats(self.chosen, start, end), _integers(self.ranks, start, end)
        ids = _integers(self.top_ids, start * count, end * count)
        logprobs = _floats(self.top_logprobs, start * count, end * count)
        top = list(zip(ids, logprobs, strict=True))
        return [
            TokenLogprobs(own, rank, tuple(top[index * count : (index + 1) * count]))
            for index, (own, rank) in enumerate(zip(chosen, ranks, strict=True))
        ]


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Returns parts that follow each other as one. There is at least one."""
    if len(parts) == 1:
        return parts[0]
    return PromptLogprobs(
        parts[0].top_count,
        b"".join(part.chosen for part in parts),
        b"".join(part.ranks for part in parts),
        b"".join(part.top_ids for part in parts),
        b"".join(part.top_logprobs for part in parts),
    )


def can_be_sent(num_tokens: int, top_count: int) -> bool:
    """Returns whether one message between hosts can carry what is known of so many tokens."""
    return num_tokens * (1 + top_count) * 2 * NUMBER_BYTES <= MAX_SENT_BYTES


def _floats(packed: bytes, start: int, end: int) -> tuple[float, ...]:
    return struct.unpack(f"<{max(end - start, 0)}f", packed[start * NUMBER_BYTES : end * NUMBER_BYTES])


def _integers(packed: bytes, start: int, end: int) -> tuple[int, ...]:
    return struct.unpack(f"<{max(end - start, 0)}I", packed[start * NUMBER_BYTES : end * NUMBER_BYTES])
