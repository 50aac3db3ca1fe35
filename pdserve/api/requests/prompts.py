"""Turns a validated request into the token ids that the engine gets.

The tokenizer encodes the text of a prompt, which the model's template has made where it is a chat. ``ModelLimits``
refuses what the model's context or vocabulary does not hold, and truncates where the client asked for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from pdserve.api.requests.chat_messages import last_answer, render_chat
from pdserve.api.requests.openai_request import (
    MAX_CHOICES,
    MAX_ITEMS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from pdserve.api.requests.preparing import Check
from pdserve.api.requests.tokenizer import MAX_CUT_CHARS, Tokenizer
from pdserve.errors import InvalidRequest

ENDING_CHARS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine."""

    token_ids: list[int]
    max_tokens: int
    echo: str = ""
    """The text that is shown before the answer."""
    echoes_special: bool = False
    """Whether that text has special tokens."""
    ending: str = ""
    """The end of a chat's text, which may begin what the answer goes on with."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The lengths and token ids that the engine takes, by its own words."""

    max_model_len: int
    vocab_size: int

    def check_ids(self, token_ids: Sequence[int], param: str) -> list[int]:
        """Returns the ids if the vocabulary has them all. Raises InvalidRequest."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise InvalidRequest(
                f"token id {wrong} is out of vocabulary: the model has {self.vocab_size} ids, from 0 to "
                f"{self.vocab_size - 1}",
                param=param,
            )
        return list(token_ids)

    def encode(
        self, text: str, tokenizer: Tokenizer, param: str, *, add_special_tokens: bool, cut: bool = False
    ) -> list[int]:
        """Returns the ids of a text that fits into the context, or that is to be ``cut`` or counted.

        Raises InvalidRequest for a text that is longer than that, as soon as it is known.
        """
        least = tokenizer.least_tokens(text)
        if not (cut and len(text) <= MAX_CUT_CHARS):
            self.check_count(least, param, at_least=True)
        most = max(self.max_model_len, MAX_ITEMS) if cut else self.max_model_len

        def check(count: int) -> None:
            if count > most:
                self.check_count(count, param)

        return tokenizer.encode(text, add_special_tokens=add_special_tokens, check=check)

    def check_count(self, count: int, param: str, *, at_least: bool = False) -> None:
        """Raises InvalidRequest if no context could hold that many ids."""
        if count > self.max_model_len:
            least = "at least " if at_least else ""
            raise InvalidRequest(
                f"{self._length}. However, {least}{count} tokens were given.",
                param=param,
                code="context_length_exceeded",
            )

    def fit(self, token_ids: list[int], request: GenerationRequest, param: str) -> tuple[list[int], int]:
        """Returns the prompt, cut if the client asked for that, and the number of tokens that may be generated.

        Raises InvalidRequest if prompt and output do not fit.
        """
        wanted = request.wanted_tokens
        self.check_ids(request.stop_token_ids or (), "stop_token_ids")
        self.check_ids(request.allowed_token_ids or (), "allowed_token_ids")
        self.check_ids(list(request.logit_bias or ()), "logit_bias")
        self.check_ids(request.logprob_token_ids or (), "logprob_token_ids")
        token_ids = self._truncate(token_ids, request)
        count = len(token_ids)
        if count == 0:
            raise InvalidRequest("the prompt has no tokens", param=param, code="empty_prompt")
        if count + (1 if wanted is None else wanted) > self.max_model_len:
            asked = "" if wanted is None else f", and {wanted} tokens of output are asked for"
            raise InvalidRequest(
                f"{self._length}. However, the prompt has {count} tokens{asked}.",
                param=param if count >= self.max_model_len else "max_tokens",
                code="context_length_exceeded",
            )
        free = self.max_model_len - count
        max_tokens = min(request.default_tokens or free, free) if wanted is None else wanted
        if (request.min_tokens or 0) > max_tokens:
            raise InvalidRequest(f"'min_tokens' is above the {max_tokens} tokens that may come", param="min_tokens")
        # A prompt whose log probabilities alone are wanted gets a token too, with its last step, that is not shown.
        return token_ids, max(max_tokens, 1)

    @property
    def _length(self) -> str:
        """Clients know by these words, which are OpenAI's, that a shorter prompt may help."""
        return f"This model's maximum context length is {self.max_model_len} tokens"

    def _truncate(self, token_ids: list[int], request: GenerationRequest) -> list[int]:
        keep = request.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep == 0:
            raise InvalidRequest("'truncate_prompt_tokens' must be at least 1, or -1", param="truncate_prompt_tokens")
        if keep < 0:
            wanted = request.wanted_tokens
            keep = max(self.max_model_len - ((request.default_tokens or 1) if wanted is None else wanted), 1)
        return token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]


def chat_prompts(
    request: ChatRequest, tokenizer: Tokenizer, limits: ModelLimits, created: int, check: Check
) -> list[Prompt]:
    """Returns the one prompt of a chat request, which came at the time ``created``. Raises InvalidRequest."""
    text = render_chat(request, tokenizer, created)
    check()
    # A template writes the special tokens that the model wants; it would be given some of them twice.
    special, cut = bool(request.add_special_tokens), request.truncate_prompt_tokens is not None
    token_ids = limits.encode(text, tokenizer, "messages", add_special_tokens=special, cut=cut)
    fitted, max_tokens = limits.fit(token_ids, request, "messages")
    return [Prompt(fitted, max_tokens, _echoed_answer(request, text), ending=text[-ENDING_CHARS:])]


def _echoed_answer(request: ChatRequest, text: str) -> str:
    """Returns what is shown before the answer to a chat, which the template has rendered as ``text``.

    Raises InvalidRequest where it may be longer than the prompt: every choice repeats it.
    """
    if not request.echo:
        return ""
    if request.truncate_prompt_tokens is not None:
        raise InvalidRequest("'echo' of a chat excludes 'truncate_prompt_tokens'", param="echo")
    echoed = last_answer(request)
    if len(echoed) > len(text):
        raise InvalidRequest("the model's chat template does not show the last message to echo", param="echo")
    return echoed


def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, limits: ModelLimits, check: Check
) -> list[Prompt]:
    """Returns the prompts of a completion request. Raises InvalidRequest."""
    given = _listed(request.prompt)
    if len(given) * request.choices > MAX_CHOICES:
        raise InvalidRequest(f"prompts times 'n', or 'best_of', may be at most {MAX_CHOICES}", param="n")
    added, cut = request.add_special_tokens is not False, request.truncate_prompt_tokens is not None
    prompts = []
    for index, item in enumerate(given):
        check()
        param = "prompt" if len(given) == 1 else f"prompt[{index}]"
        if isinstance(item, str):
            token_ids = limits.encode(item, tokenizer, param, add_special_tokens=added, cut=cut)
        else:
            token_ids = item
        fitted, max_tokens = limits.fit(token_ids, request, param)
        if not isinstance(item, str):
            # Before ``fit`` there could be more ids than any context holds.
            limits.check_ids(fitted, param)
        # Special tokens that a client has given as ids are shown, as those are that it has written.
        special = not isinstance(item, str) or request.skip_special_tokens is False
        whole = item if isinstance(item, str) and len(fitted) == len(token_ids) else None
        echo = _echo(request, whole, fitted, tokenizer, special=special)
        prompts.append(Prompt(fitted, max_tokens, echo, special))
    return prompts


def _listed(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Returns the prompts as a list, whichever of OpenAI's four forms they come in."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequest("'prompt' mixes strings, token ids and lists", param="prompt")
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    return cast("list[str | list[int]]", prompt)


def _echo(
    request: CompletionRequest, whole: str | None, fitted: list[int], tokenizer: Tokenizer, *, special: bool
) -> str:
    if not request.echo:
        return ""
    return tokenizer.decode(fitted, skip_special_tokens=not special) if whole is None else whole
