"""Turns text into token ids and back, for one model.

transformers is not loaded but for a tokenizer that is not in the cache yet (``cached_tokenizer``): the library
``tokenizers`` encodes, and ``chat_template`` renders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError

from pdserve.api.answers.detokenizer import (
    BytesDetokenizer,
    Detokenizer,
    TokenBytes,
    WindowDetokenizer,
    byte_level_bytes,
    piece_bytes,
)
from pdserve.api.answers.openai_response import AddedToken, TokenizerInfo
from pdserve.api.requests.chat_template import RESERVED, ChatTemplate
from pdserve.errors import InvalidRequest, ModelError
from pdserve.models.checkpoint.cached_tokenizer import CachedTokenizer, read_tokenizer

LOGGED_CHARS = 500
MAX_CUT_CHARS = 2**18
"""How long a text may be that no context holds, and that is to be cut or counted. Others wait while it is
tokenised, which takes half a second."""


class Tokenizer:
    """Encodes prompts and makes a detokenizer for each output. All requests share it; it keeps no state of theirs."""

    def __init__(self, kept: CachedTokenizer) -> None:
        """Raises ModelError if the library cannot read it."""
        try:
            self._backend = tokenizers.Tokenizer.from_str(kept.backend)
        except Exception as exc:  # The library raises nothing more special.
            raise ModelError(f"the tokenizer cannot be read: {exc}") from exc
        self._backend.encode_special_tokens = kept.split_special_tokens
        # A tokenizer.json may carry the truncation of its training; a served prompt is never cut in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_texts = frozenset(token.content for token in added.values() if not token.special)
        self._longest_token = max(map(len, self._backend.get_vocab()), default=1)
        self._byte_level = self._is_byte_level()
        self._counts_bytes = self._byte_level and self._backend.normalizer is None
        self._token_bytes = TokenBytes(self._backend.id_to_token, byte_level_bytes if self._byte_level else piece_bytes)
        self._special_tokens = kept.special_tokens
        self._written_template = kept.chat_template
        self._dates = DatedTemplate(kept.chat_template)
        self._chat = ChatTemplate(self._dates.template, kept.special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._written_template)

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty if there is none."""
        return self._dates.template

    def info(self, max_model_len: int) -> TokenizerInfo:
        """Returns what clients may know of the tokeniser of a model with contexts of ``max_model_len`` tokens."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        bos, eos, pad, unk = (self._special_tokens.get(name) for name in names)
        added = sorted(self._backend.get_added_tokens_decoder().items())
        return TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            model_max_length=max_model_len,
            bos_token=bos,
            eos_token=eos,
            pad_token=pad,
            unk_token=unk,
            additional_special_tokens=[
                token.content for _, token in added if token.special and token.content not in {bos, eos, pad, unk}
            ],
            added_tokens_decoder={
                str(token_id): AddedToken(
                    token.content, token.lstrip, token.normalized, token.rstrip, token.single_word, token.special
                )
                for token_id, token in added
            },
            chat_template=self._written_template or None,
        )

    def encode(
        self, text: str, *, add_special_tokens: bool, check: Callable[[int], None] = lambda _: None
    ) -> list[int]:
        """Returns the token ids of ``text``. Special tokens that are written in it count as such.

        ``check`` gets how many there are, and may raise, before they are listed, which lets nothing else run.
        """
        # The batch call, even for one text: unlike `encode` it lets other threads run meanwhile.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        check(len(encoding))
        return list(encoding.ids)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token that is written like ``text``; None if there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def added_id(self, text: str) -> int | None:
        """Returns the id of the added token, special or not, that is written like ``text``; None if there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids or text in self._added_texts else None

    def is_text_token(self, text: str) -> bool:
        """Returns whether an added token, but no special one, is written like ``text``."""
        return text in self._added_texts

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary's own spelling of each token."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that ``text`` has at least, without tokenising it."""
        # The characters of such a vocabulary stand for bytes.
        return (len(text.encode()) if self._counts_bytes else len(text)) // self._longest_token

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        created: int,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Returns the conversation in the form that the model was trained on.

        A template that asks for the date gets that of ``created``, in seconds since 1970, so that all nodes render the
        same text.

        Raises InvalidRequest where the model has no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        if clash := sorted(RESERVED & template_kwargs.keys()):
            raise InvalidRequest(f"{clash[0]!r} cannot be set here", param=f"chat_template_kwargs.{clash[0]}")
        try:
            return self._chat.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**template_kwargs, **self._dates.given(created)},
            )
        except Exception as exc:
            # A template is a program: what it raises on messages that it does not expect is not a closed set.
            raise _refused_by_template(exc, bool(template_kwargs)) from exc

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token by itself, which may be part of a character.

        There are none if the vocabulary has no such token.
        """
        return self._token_bytes[token_id]

    def detokenizer(self, *, skip_special_tokens: bool, shown: Collection[str] = ()) -> Detokenizer:
        """Returns a new detokenizer, for one output. Tokens whose text is among ``shown`` are never skipped."""
        skip = self._special_ids if skip_special_tokens else frozenset()
        if shown and skip:
            skip -= {token_id for text in shown if (token_id := self._backend.token_to_id(text)) is not None}
        if self._byte_level:
            return BytesDetokenizer(self._token_bytes, skip)
        return WindowDetokenizer(lambda ids: str(self._backend.decode(ids, skip_special_tokens=False)), skip)

    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        steps = state["decoders"] if state.get("type") == "Sequence" else [state]
        return [step.get("type") for step in steps] == ["ByteLevel"]


class DatedTemplate:
    """A chat template whose dates are given to it, where it writes a date's format as a literal.

    By itself, ``strftime_now`` says what the node's clock does, and transformers gives templates no other function.
    """

    _CALL = re.compile(r"""\bstrftime_now\(\s*(["'])([^"'\\]*)\1\s*\)""")
    _DATES = "pdserve_dates"

    def __init__(self, template: str) -> None:
        self._formats = {found[2] for found in self._CALL.finditer(template)}
        self.template = self._CALL.sub(rf"{self._DATES}[\1\2\1]", template)

    def given(self, at_s: int) -> dict[str, dict[str, str]]:
        """Returns the variables that the template needs, with the dates at a time in seconds since 1970, in UTC."""
        if not self._formats:
            return {}
        now = datetime.fromtimestamp(at_s, UTC)
        return {self._DATES: {wanted: now.strftime(wanted) for wanted in self._formats}}


class TemplateFailed(InvalidRequest):
    """A chat template cannot render a request's messages. ``detail`` is for the node's log, not for the client."""

    def __init__(self, message: str, *, param: str, detail: str) -> None:
        super().__init__(message, param=param)
        self.detail = detail


def _refused_by_template(error: Exception, has_kwargs: bool) -> InvalidRequest:
    """Returns the client's error, which has the template's own words, but not those of the libraries around it."""
    if type(error) is TemplateError:
        return InvalidRequest(f"the model's chat template refuses these messages: {error}", param="messages")
    detail = f"{type(error).__name__}: {str(error)[:LOGGED_CHARS]!r}"
    if has_kwargs:
        return TemplateFailed(
            "the model's chat template cannot render these messages with these 'chat_template_kwargs'",
            param="chat_template_kwargs",
            detail=detail,
        )
    return TemplateFailed("the model's chat template cannot render these messages", param="messages", detail=detail)


def load_tokenizer(model_dir: Path, cache_dir: Path | None = None) -> Tokenizer:
    """Returns the tokenizer, with its chat template, of a Hugging Face folder or of a GGUF file. Raises ModelError.

    It is read from ``cache_dir`` if it is there, and cached there if it is not.
    """
    return Tokenizer(read_tokenizer(model_dir, cache_dir))
