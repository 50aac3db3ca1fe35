"""Turns text into token ids and back, for one model.

Only ``PreTrainedTokenizerFast`` is used of transformers: it reads the same files as ``AutoTokenizer`` and renders chat
templates with the same code, but does not import torch (0.6 s and 120 MB against 2.3 s and 600 MB).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from pdserve.errors import InvalidRequest, ModelError
from pdserve.models.checkpoint.gguf_file import is_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


LOGGED_CHARS = 500
MAX_CUT_CHARS = 2**20
"""How long a text may be that is to be cut or counted, and so may be longer than any context."""


class Tokenizer:
    """Encodes prompts and makes a detokenizer for each output. All requests share it; it keeps no state of theirs."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._chat = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may carry the truncation of its training; a served prompt is never cut in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._longest_token = max(map(len, self._backend.get_vocab()), default=1)
        self._byte_level = self._is_byte_level()
        self._token_bytes = TokenBytes(self._backend.id_to_token, byte_level_bytes if self._byte_level else piece_bytes)
        self._dates = DatedTemplate(tokenizer.get_chat_template() if tokenizer.chat_template else "")
        self._reserved_kwargs = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {
            "messages",
            "conversations",
            "self",
        }

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat.chat_template)

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty if there is none."""
        return self._dates.template

    def info(self, max_model_len: int) -> TokenizerInfo:
        """Returns what clients may know of the tokeniser of a model with contexts of ``max_model_len`` tokens."""
        named = (self._chat.bos_token, self._chat.eos_token, self._chat.pad_token, self._chat.unk_token)
        bos, eos, pad, unk = (None if token is None else str(token) for token in named)
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
            chat_template=self._chat.get_chat_template() if self.has_chat_template else None,
        )

    def encode(
        self, text: str, *, add_special_tokens: bool, check: Callable[[int], None] = lambda _: None
    ) -> list[int]:
        """Returns the token ids of ``text``. Special tokens that are written in it count as such.

        ``check`` is told how many there are, and may raise, before they are listed, which lets nothing else run.
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

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary's own spelling of each token."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that ``text`` has at least, without tokenising it."""
        return len(text) // self._longest_token

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
        if clash := sorted(self._reserved_kwargs & template_kwargs.keys()):
            raise InvalidRequest(f"{clash[0]!r} cannot be set here", param=f"chat_template_kwargs.{clash[0]}")
        try:
            text = self._chat.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._dates.template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**template_kwargs, **self._dates.given(created)},
            )
        except Exception as exc:
            # A template is a program: what it raises on messages that it does not expect is not a closed set.
            raise _refused_by_template(exc, bool(template_kwargs)) from exc
        if not isinstance(text, str):
            raise InvalidRequest("the model's chat template rendered no text", param="messages")
        return text

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


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Returns the tokenizer, with its chat template, of a Hugging Face folder or of a GGUF file. Raises ModelError."""
    # Imported here, so that it happens while the engine loads weights, and never on a prefill node.
    if is_gguf(model_dir):
        from pdserve.models.checkpoint.gguf_tokenizer import gguf_tokenizer

        return Tokenizer(gguf_tokenizer(model_dir))
    from transformers import PreTrainedTokenizerFast

    if not (model_dir / "tokenizer.json").is_file():
        raise ModelError(f"{model_dir} has no tokenizer.json")
    try:
        return Tokenizer(PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelError(f"cannot read the tokenizer in {model_dir}: {exc}") from exc
