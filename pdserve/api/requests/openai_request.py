"""Reads request bodies in OpenAI's form, and refuses them with errors that name the field.

``check_values`` bounds how many JSON values a body may hold, whatever its size. Each value costs time in which the
interpreter does nothing else, a hundred times that of a byte of text: 8 MiB of ``[],`` took a second. The values are
counted without being built, in pieces, so that other threads get their turns.

``refuse_unsupported`` refuses fields of OpenAI's and vLLM's requests that pdserve knows and does not honour, unless
they ask for nothing. To ignore them would be worse: a client that asks for JSON or for a tool call would get
neither, with status 200.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidRequest

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


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Each field has the values beside ``null`` that mean the same as leaving it out."""

ACCEPTED = frozenset(_NEUTRAL) | {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields that are ignored without a warning. They say something about the request, and nothing about its answer."""


def refuse_unsupported(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raises InvalidRequest for the first field that asks for something that pdserve cannot do."""
    for name, raw in fields.items():
        if name not in _NEUTRAL:
            continue
        if not _asks_for_nothing(raw, _NEUTRAL[name]):
            raise InvalidRequest(f"{name!r} is not supported by pdserve", param=name, code="unsupported_parameter")


def _asks_for_nothing(raw: msgspec.Raw, neutrals: tuple[Any, ...]) -> bool:
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        # Too many digits, too deep, half a surrogate pair: whatever it is, it is not a neutral value.
        return False
    return value is None or any(_same(value, neutral) for neutral in neutrals)


def _same(value: Any, neutral: Any) -> bool:
    """Returns whether the values are equal. It tells 0 from False, as JSON does."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


MAX_STOPS = 16
MAX_CHOICES = 1_024
MAX_MESSAGES = 4_096
MAX_LOGPROBS = 20
MAX_BIASES = 1_024
MAX_ALLOWED = 16_384
MAX_BAD_WORDS = 128
SEARCHED_BYTES = 65_536
"""How many bytes of a body that is no JSON are searched for the reason."""

T = TypeVar("T", bound=msgspec.Struct)
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Messages: TypeAlias = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1_024)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
TopCount: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
BadWord: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk says how many tokens were used so far. It needs ``include_usage``."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that chat and text completions share. ``None`` is OpenAI's ``null``, the same as no field."""

    model: str
    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """How many of the likeliest tokens may be chosen. 0 and -1 are no limit."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Positive | None = None
    """How many tokens a chunk of a stream has. The first token comes at once."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """How many tokens of the prompt's end are kept. -1 keeps as many as fit."""
    add_special_tokens: bool | None = None
    """Those that the tokeniser puts around a text, as ``<s>``: by default around prompts, and not around chats."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether log probabilities name tokens like ``token_id:17``."""
    cache_salt: Annotated[str, Meta(max_length=1_024)] | None = None
    """Prompts find each other's blocks in prefix caches only under the same salt."""

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wanted_tokens(self) -> int | None:
        """How many tokens the client asks for at most. None means as many as fit."""
        return self.max_tokens

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported beside each chosen one. None reports no log probabilities."""
        return None


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

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    echo: bool | None = None
    best_of: Positive | None = None
    logprobs: TopCount | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /tokenize``. It has a ``prompt``, or ``messages`` that are rendered as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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
        self._decoder = msgspec.json.Decoder(request)
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known = _names(request)
        self._nested = {"stream_options": _names(StreamOptions)} if "stream_options" in self._known else {}

    def parse(self, body: bytes) -> Parsed[T]:
        """Returns the request in ``data``. Raises InvalidRequest, which names the field if one is at fault."""
        check_values(body)
        try:
            fields = self._fields.decode(body)
            refuse_unsupported({name: raw for name, raw in fields.items() if name not in self._known})
            request = self._decoder.decode(body)
            nested = self._unknown_nested(fields)
        except msgspec.ValidationError as exc:
            raise _invalid_field(exc) from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            what = (
                "a string in it has an unpaired surrogate"
                if _UNPAIRED_SURROGATE.search(body[:SEARCHED_BYTES])
                else str(exc)
            )
            raise InvalidRequest(f"the body is not valid JSON: {what}", code="invalid_json") from exc
        except RecursionError as exc:
            raise InvalidRequest("the body is nested too deeply", code="invalid_json") from exc
        unknown = tuple(name for name in fields if name not in self._known and name not in ACCEPTED)
        return Parsed(request, unknown + nested)

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
    return {field.encode_name for field in msgspec.structs.fields(struct)}


_UNPAIRED_SURROGATE = re.compile(
    rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?<!\\)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""Finds unpaired surrogates, only to name them in the error: msgspec calls most of them truncated input."""
_VALIDATION = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")


def _invalid_field(error: msgspec.ValidationError) -> InvalidRequest:
    match = _VALIDATION.fullmatch(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    # Which entry of an object it was is not said.
    path = path.removesuffix("[...]")
    if missing := _MISSING.match(what):
        param = f"{path}.{missing['field']}".lstrip(".")
        return InvalidRequest(f"{param!r} is required", param=param, code="missing_required_parameter")
    if not path:
        return InvalidRequest(f"the body is not acceptable: {what}")
    return InvalidRequest(f"{path!r} is not acceptable: {what[:1].lower()}{what[1:]}", param=path)
