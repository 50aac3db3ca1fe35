"""Refuses fields of others' requests that pdserve knows and does not honour, unless they ask for nothing.

To ignore them would be worse: a client that asks for JSON, a tool call or a beam search would get none of them, with
status 200. The fields are those of OpenAI, vLLM, SGLang, llama.cpp and transformers that change an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.errors import InvalidRequest

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
            instead = f": use {_NEWER[name]!r}" if name in _NEWER else ""
            raise InvalidRequest(
                f"{name!r} is not supported by pdserve{instead}", param=name, code="unsupported_parameter"
            )


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
