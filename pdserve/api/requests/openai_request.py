"""Reads request bodies in OpenAI's form, and refuses them with errors that name the field.

``check_values`` bounds how many JSON values a body may hold, whatever its size. Each value costs time in which the
interpreter does nothing else, a hundred times that of a byte of text: 8 MiB of ``[],`` took a second. The values are
counted without being built, in pieces, so that other threads get their turns.

An integer may be written like ``3.0``, as JSON Schema has it. Only a body that has such a number is read twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from pdserve.api.requests.request_fields import (
    MAX_BIASES,
    MAX_MESSAGES,
    WITHOUT_EFFECT,
    Bias,
    Count,
    CountOrAll,
    Positive,
    ReasoningEffort,
    StopList,
    StopString,
    TokenId,
    TopCount,
    refuse_unsupported,
)
from pdserve.api.requests.structured_outputs import ResponseFormat, StructuredFields, StructuredOutputs
from pdserve.api.requests.tools import ToolChoice, Tools
from pdserve.errors import InvalidRequest
from pdserve.http.request import as_whole

UNCOUNTED_BYTES = 100_000
"""Shorter bodies cannot hold too many values, and are not counted."""
MAX_CONTAINERS = 50_000
"""How many lists, objects and entries of objects a body may hold."""
MAX_ITEMS = 500_000
"""How many values the lists and objects of a body may hold. Most of them are the token ids of prompts."""
_PIECE_BYTES = 65_536


def check_values(body: bytes) -> None:
    """Raises InvalidRequest for a body with too many values. Of one that is no JSON it may say anything."""
    if len(body) <= UNCOUNTED_BYTES:
        return
    containers = items = start = 0
    in_string = False
    while start < len(body):
        piece = _piece(body, start)
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        containers += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        items += outside.count(b",")
        if containers > MAX_CONTAINERS or items > MAX_ITEMS:
            raise InvalidRequest(
                f"the body holds too many JSON values: at most {MAX_CONTAINERS} lists, objects and fields, "
                f"and {MAX_ITEMS} values in them",
                code="too_many_values",
            )


def _piece(body: bytes, start: int) -> bytes:
    """Returns the next piece, which does not end between a backslash and what that escapes."""
    piece = body[start : start + _PIECE_BYTES]
    backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return piece + body[start + len(piece) : start + len(piece) + 1] if backslashes % 2 else piece


MAX_CHOICES = 1_024
MAX_LOGPROB_IDS = 128
MAX_BEST_OF = 20
TEXT_TOKENS = 16
"""How many tokens a text completion has whose request does not say, as OpenAI and vLLM have it."""
NAMED_BIASES = 8
"""An error names at most this many wrong keys of ``logit_bias``."""
MAX_ALLOWED = 16_384
MAX_BAD_WORDS = 128
SEARCHED_BYTES = 65_536
"""How many bytes of a body that is no JSON are searched for the reason."""

T = TypeVar("T", bound=msgspec.Struct)
Messages: TypeAlias = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
BadWord: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk says how many tokens were used so far. It implies ``include_usage`` where that is missing,
    and does nothing where that is false, as vLLM has it.
    """


class GenerationRequest(StructuredFields, kw_only=True):
    """The fields that chat and text completions share."""

    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    stop: StopString | StopList | None = None
    include_stop_str_in_output: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: CountOrAll | None = None
    """How many of the last tokens of the prompt stay. -1 keeps as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that ``truncate_prompt_tokens`` cuts off. It is the left one, the prompt's beginning, if missing."""
    add_special_tokens: bool | None = None
    """Those that the tokeniser puts around a text, as ``<s>``: by default around prompts, and not around chats."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether log probabilities name tokens like ``token_id:17``."""
    logprob_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_LOGPROB_IDS)] | None = None
    """The tokens that are reported beside each chosen one, in place of the likeliest."""
    prompt_logprobs: TopCount | None = None
    """How many of the likeliest tokens are reported beside each token of the prompt."""

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        options = self.stream_options or StreamOptions()
        return bool(options.continuous_usage_stats if options.include_usage is None else options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wanted_tokens(self) -> int | None:
        """How many tokens the client asks for at most. None means that it does not say."""
        return self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """How many tokens come at most if the client does not say, and they fit. None means as many as fit."""
        return None

    @property
    def choices(self) -> int:
        """How many answers each prompt gets."""
        return self.shown_choices

    @property
    def shown_choices(self) -> int:
        """How many of a prompt's answers the client gets."""
        return self.n or 1

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported beside each chosen one. None reports no log probabilities."""
        return None

    @property
    def sampled_logprobs(self) -> int | None:
        """As ``wanted_logprobs``, where this node needs log probabilities too, to choose among answers."""
        return self.wanted_logprobs

    @property
    def most_beside(self) -> int:
        """How many tokens at most are reported beside each chosen one."""
        return len(self.logprob_token_ids or ()) or self.sampled_logprobs or 0

    @property
    def echo_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported beside each token of an echoed prompt."""
        return None

    @property
    def scored_logprobs(self) -> int | None:
        """How many of the likeliest tokens the engine has to report beside each token of the prompt."""
        asked = [count for count in (self.prompt_logprobs, self.echo_logprobs) if count is not None]
        return max(asked, default=None)

    @property
    def scores_only(self) -> bool:
        """Whether the client wants nothing but the prompt's log probabilities."""
        return False

    @property
    def has_complete_journal(self) -> bool:
        """Whether another node can go on with the answer in one piece: it cannot choose among several answers."""
        return self.choices == self.shown_choices


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of ``POST /v1/chat/completions``. ``chat_messages`` and the model's template check its messages."""

    messages: Messages
    max_completion_tokens: Positive | None = None
    """OpenAI's newer name of ``max_tokens``. It counts where both are given."""
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    """How much the model is to think. It has an effect where the chat template knows such a choice."""
    include_reasoning: bool | None = None
    """Whether the answer shows what the model thinks. It does if missing."""
    echo: bool | None = None
    """Whether the answer begins with the last message, if that has the answer's role."""

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    max_tokens: Count | None = None
    """0 asks for the prompt's log probabilities alone."""
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_BEST_OF)] | None = None
    """How many answers are generated, of which the ``n`` with the highest log probabilities are shown."""
    logprobs: TopCount | None = None

    @property
    def default_tokens(self) -> int | None:
        return TEXT_TOKENS

    @property
    def choices(self) -> int:
        return max(self.best_of or 1, self.shown_choices)

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def sampled_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.choices > self.shown_choices else self.logprobs

    @property
    def echo_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def scores_only(self) -> bool:
        return self.max_tokens == 0


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /tokenize``. It has a ``prompt``, or ``messages`` that are rendered as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None
    """Whether the answer has the vocabulary's own spelling of each token too."""
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None


class TokenizerInfoRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /tokenizer_info``, or the query of ``GET /tokenizer_info``."""

    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed(Generic[T]):
    """A request, and the names of the fields in its body that pdserve does not know."""

    request: T
    ignored: tuple[str, ...]


class BodyParser(Generic[T]):
    """Reads the bodies of one route."""

    def __init__(self, request: type[T]) -> None:
        self._request = request
        self._decoder = msgspec.json.Decoder(request)
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known = _names(request)
        self._nested = {name: _names(struct) for name, struct in _NESTED.items() if name in self._known}

    def parse(self, body: bytes) -> Parsed[T]:
        """Returns the request in ``body``. Raises InvalidRequest, which names the field if one is at fault."""
        check_values(body)
        fields: dict[str, msgspec.Raw] = {}
        try:
            fields = self._fields.decode(body)
            refuse_unsupported({name: raw for name, raw in fields.items() if name not in self._known})
            request = self._decode(body, fields)
            nested = self._unknown_nested(fields)
        except msgspec.ValidationError as exc:
            raise invalid_field(exc, fields) from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            if not body.strip():
                raise InvalidRequest("the request has no body: it takes a JSON object", code="empty_body") from exc
            what = (
                "a string in it has an unpaired surrogate"
                if _UNPAIRED_SURROGATE.search(body[:SEARCHED_BYTES])
                else str(exc)
            )
            raise InvalidRequest(f"the body is not valid JSON: {what}", code="invalid_json") from exc
        except RecursionError as exc:
            raise InvalidRequest("the body is nested too deeply", code="invalid_json") from exc
        unknown = tuple(name for name in fields if name not in self._known and name not in WITHOUT_EFFECT)
        return Parsed(request, unknown + nested)

    def _decode(self, body: bytes, fields: Mapping[str, msgspec.Raw]) -> T:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as exc:
            if "got `float`" not in str(exc):
                raise
        known = {name: raw for name, raw in fields.items() if name in self._known}
        decoders = {name: _any_decoder if name in _VERBATIM else _whole_decoder for name in known}
        values = {name: decoders[name].decode(raw) for name, raw in known.items()}
        return msgspec.convert(values, self._request, str_keys=True)

    def _unknown_nested(self, fields: dict[str, msgspec.Raw]) -> tuple[str, ...]:
        """Returns the names of unknown fields within valid ones."""
        within = {
            name: self._fields.decode(fields[name])
            for name in self._nested.keys() & fields.keys()
            if bytes(fields[name]) != b"null"
        }
        return tuple(
            f"{name}.{key}" for name, inner in within.items() for key in inner if key not in self._nested[name]
        )


def _names(struct: type[msgspec.Struct]) -> set[str]:
    return set(struct.__struct_encode_fields__)


_UNPAIRED_SURROGATE = re.compile(
    rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?<!\\)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""Finds unpaired surrogates, only to name them in the error: msgspec calls most of them truncated input."""
_VALIDATION = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")


def invalid_field(error: msgspec.ValidationError, fields: Mapping[str, msgspec.Raw]) -> InvalidRequest:
    """Returns an error that names the field at fault of a body with ``fields``."""
    match = _VALIDATION.fullmatch(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    # Which entry of an object it was is not said.
    path = path.removesuffix("[...]")
    if missing := _MISSING.match(what):
        param = f"{path}.{missing['field']}".lstrip(".")
        return InvalidRequest(f"{param!r} is required", param=param, code="missing_required_parameter")
    if not path:
        return InvalidRequest(f"the body is not acceptable: {what}")
    place = f"{path!r} is not acceptable"
    if path == "logit_bias" and path in fields and (keys := _wrong_biases(fields[path])):
        place += f" at {', '.join(repr(key[:64]) for key in keys)}"
    return InvalidRequest(f"{place}: {what[:1].lower()}{what[1:]}", param=path)


def _wrong_biases(raw: msgspec.Raw) -> tuple[str, ...]:
    """Returns the first wrong keys of ``logit_bias``: those that are no token id, or have no bias."""
    try:
        entries = _biases_decoder.decode(raw)
    except msgspec.DecodeError:
        return ()
    wrong = (key for key, value in islice(entries.items(), MAX_BIASES) if not _is_bias(key, value))
    return tuple(islice(wrong, NAMED_BIASES))


def _is_bias(key: str, value: msgspec.Raw) -> bool:
    try:
        _bias_decoder.decode(b"{%b:%b}" % (msgspec.json.encode(key), value))
    except msgspec.DecodeError:
        return False
    return True


_NESTED: dict[str, type[msgspec.Struct]] = {
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
}
"""The fields whose own unknown fields are named."""
_VERBATIM = (
    *("messages", "chat_template_kwargs", "tools"),
    *("response_format", "structured_outputs", "guided_json", "json_schema"),
)
"""The fields whose numbers a chat template or a grammar gets as they were written."""


_any_decoder = msgspec.json.Decoder()
_whole_decoder = msgspec.json.Decoder(float_hook=as_whole)
_biases_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_bias_decoder = msgspec.json.Decoder(dict[TokenId, Bias])
