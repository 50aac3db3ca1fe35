"""The responses of the routes, in OpenAI's form."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]
StopReason: TypeAlias = str | int | None
"""The stop string or the stop token that ended a choice; None if neither did."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    """The tokens with which the model thinks, with their markers."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Envelope(msgspec.Struct):
    """What all chunks of one response have in common; ``choices`` and ``usage`` follow."""

    id: str
    object: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str


# ------------------------------------------------------------------ chat


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    """The bytes of the token itself, which may be part of a character."""


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    arguments: str
    """A JSON object, as far as the model has written one."""
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ToolCallDelta(msgspec.Struct):
    """What a chunk adds to a call. The first one has the id, the type and the name."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """What the model thinks, by the name that DeepSeek and SGLang give it."""
    reasoning: str | UnsetType = UNSET
    """The same by vLLM's name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    finish_reason: Finish
    logprobs: msgspec.Raw | None = None
    """``ChatLogprobs`` as JSON."""
    stop_reason: StopReason = None
    matched_stop: StopReason = None
    """What ended the choice, by SGLang's name, which has the model's own end as well."""
    token_ids: list[int] | None = None


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: Finish | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: StopReason | UnsetType = UNSET
    matched_stop: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


# ------------------------------------------------------------------ text


class TextLogprobs(msgspec.Struct):
    """The log probabilities of a text completion. Each list has one item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The chosen token is always in it. The first token of an echoed prompt has None."""
    text_offset: list[int]
    """How many characters of the choice's text are before the token."""


class PromptTokenLogprob(msgspec.Struct):
    """One token of a prompt, or one that was likely in its place."""

    logprob: float
    rank: int
    decoded_token: str


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: Finish
    logprobs: msgspec.Raw | None = None
    """``TextLogprobs`` as JSON."""
    stop_reason: StopReason = None
    matched_stop: StopReason = None
    """What ended the choice, by SGLang's name, which has the model's own end as well."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: msgspec.Raw | None = None
    """A list of dictionaries of ``PromptTokenLogprob`` by token id, as JSON."""


class TextChunkChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: Finish | None = None
    logprobs: TextLogprobs | msgspec.Raw | None = None
    stop_reason: StopReason | UnsetType = UNSET
    matched_stop: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


Choice: TypeAlias = ChatChoice | TextChoice
ChunkChoice: TypeAlias = ChatChunkChoice | TextChunkChoice


class Completion(msgspec.Struct):
    """A complete response of either kind. What vLLM gives too is null where nothing is to be said."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    """A chat has them here, and a text completion in each choice, as its choices may have several prompts."""
    prompt_logprobs: UnsetType | msgspec.Raw | None = UNSET


# ------------------------------------------------------------------ the other routes


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """How the vocabulary spells each token, where a space may be another character."""


class AddedToken(msgspec.Struct, frozen=True):
    """A token that the tokeniser finds in a text before all others."""

    content: str
    lstrip: bool
    normalized: bool
    rstrip: bool
    single_word: bool
    special: bool


class TokenizerInfo(msgspec.Struct, frozen=True):
    """What ``/tokenizer_info`` says of the model's tokeniser, under the names of ``tokenizer_config.json``."""

    tokenizer_class: str
    model_max_length: int
    """How many tokens the model's context has here."""
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    additional_special_tokens: list[str]
    added_tokens_decoder: dict[str, AddedToken]
    """The added tokens by their ids."""
    chat_template: str | None


class DetokenizeResponse(msgspec.Struct):
    prompt: str
