"""The fields that requests have in every dialect, with their bounds, and those that are refused or have no effect.

``SharedFields`` has the name, the type and the bounds of each field that OpenAI's routes, responses and Anthropic's
messages have in common. The types below bound the other fields that several kinds of requests have.

Fields that pdserve knows and does not honour are refused, unless they ask for nothing. To ignore them would be worse: a
client that asks for JSON, a tool call or a beam search would get none of them, with status 200. The fields are those of
OpenAI, vLLM, SGLang, llama.cpp and transformers that change an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidRequest
from pdserve.wire.terms import ItlMs, Priority, TtftMs

MAX_STOPS = 16
MAX_MESSAGES = 4_096
MAX_LOGPROBS = 20
MAX_BIASES = 1_024
_MAX_INT = 2**31 - 1

Count: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX_INT)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=_MAX_INT)]
CountOrAll: TypeAlias = Annotated[int, Meta(ge=-1, le=_MAX_INT)]
"""A number of tokens, or -1, which bounds nothing."""
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1_024)]
StopList: TypeAlias = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX_INT)]
TopCount: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class SharedFields(msgspec.Struct, kw_only=True):
    """The fields that requests of all dialects have. ``None`` is JSON's ``null``, the same as no field.

    Beside those that every dialect has of its own there are those of vLLM and pdserve that say how tokens are chosen,
    and when they come.
    """

    model: str | None = None
    """It may be missing, as there is one model here. A proxy asks for it where its cluster has several."""
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: CountOrAll | None = None
    """How many of the likeliest tokens may be chosen. 0 and -1 are no limit."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    min_tokens: Count | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream_interval: Positive | None = None
    """How many tokens a chunk of a stream has. The first token comes at once."""
    priority: Priority | None = None
    """Requests with a lower number get their places first."""
    target_ttft_ms: TtftMs | None = None
    """The first token should come within this many milliseconds. The node's target holds if missing."""
    target_itl_ms: ItlMs | None = None
    """Each later token should come within this many milliseconds. The node's target holds if missing."""
    cache_salt: Annotated[str, Meta(max_length=1_024)] | None = None
    """Prompts find each other's blocks in prefix caches only under the same salt."""


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "do_sample": (True,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "input_embeds": (),
    "input_ids": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora": ([],),
    "lora_path": ("",),
    "max_new_tokens": (),
    "media_io_kwargs": ({},),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "n_predict": (),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "num_beams": (1,),
    "prediction": (),
    "prompt_embeds": ([],),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "samplers": (),
    "session_params": (),
    "stop_regex": ([], ""),
    "suffix": ("",),
    "tfs_z": (1,),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "top_logprobs": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Each field has the values beside ``null`` that mean the same as leaving it out."""

_NEWER = {"functions": "tools", "function_call": "tool_choice"}
"""OpenAI's newer names of fields that it has given up."""

WITHOUT_EFFECT = frozenset(_NEUTRAL) | {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
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
            raise unsupported(name, f": use {_NEWER[name]!r}" if name in _NEWER else "")


def unsupported(name: str, advice: str = "") -> InvalidRequest:
    """Returns the error for a field that asks for what pdserve cannot do. ``advice`` ends the sentence."""
    return InvalidRequest(f"{name!r} is not supported by pdserve{advice}", param=name, code="unsupported_parameter")


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
