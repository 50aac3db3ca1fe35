"""The log probabilities of a request's prompts, in the two forms that its answer may have.

An echoed prompt's tokens come before the answer's own, in OpenAI's form of a text completion. ``prompt_logprobs`` lists
them by token id, as vLLM does. A prompt may have a hundred thousand tokens, so both forms are encoded piece by piece,
and other requests have their turns between two pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from pdserve.api.answers.answer_form import AnswerForm, AnswerOptions
from pdserve.api.answers.logprobs import CompleteLogprobs, ShownToken, finite
from pdserve.api.answers.openai_response import ChatLogprobs, PromptTokenLogprob, TextLogprobs
from pdserve.api.answers.text_generation import TextDelta
from pdserve.wire.sampling_params import PromptLogprobs, TokenLogprobs

_PIECE_ENTRIES = 1_024
"""About so many log probabilities are encoded at once."""

_encoder = msgspec.json.Encoder()


class PromptScores:
    """What has come of the prompts' log probabilities."""

    def __init__(self, form: AnswerForm, options: AnswerOptions) -> None:
        self._form = form
        self._options = options
        self._packed: dict[int, PromptLogprobs] = {}
        """Those that are not encoded yet, by a choice of the prompt. JSON takes ten times their memory."""
        self._echoed: dict[int, CompleteLogprobs] = {}
        self._listed: dict[int, msgspec.Raw] = {}

    def take(self, deltas: Sequence[TextDelta]) -> None:
        """Takes the log probabilities of prompts that have come with these deltas."""
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                self._packed[delta.choice] = delta.prompt_logprobs

    async def encode(self) -> None:
        """Encodes what was taken, in several turns of the event loop. It has to be done before anything is shown."""
        while self._packed:
            await self._encode(*self._packed.popitem())

    def echoed(self, choice: int) -> CompleteLogprobs | None:
        """Returns the log probabilities of the choice's echoed prompt, to be continued; None if they are not shown."""
        options = self._options
        if options.echo_logprobs is None:
            return None
        prompt = options.prompt_of(choice)
        if prompt not in self._echoed:
            # A prompt of one token has no log probability, and the engine sends none.
            self._echoed[prompt] = CompleteLogprobs()
            self._echoed[prompt].add(self._shown(choice, [ShownToken(options.prompt_ids[choice][0], None, 0)]))
        return self._echoed[prompt].copy()

    def listed(self, choice: int) -> msgspec.Raw | None:
        """Returns ``prompt_logprobs`` of the choice as JSON, or None if they were not asked for."""
        if self._options.prompt_logprobs is None:
            return None
        return self._listed.get(self._options.prompt_of(choice), msgspec.Raw(b"[null]"))

    def _shown(self, choice: int, tokens: Sequence[ShownToken]) -> ChatLogprobs | TextLogprobs:
        return self._form.logprobs(self._options.shown_prompt(tokens))

    async def _encode(self, choice: int, logprobs: PromptLogprobs) -> None:
        options = self._options
        token_ids, echo = options.prompt_ids[choice], len(options.echoes[choice])
        detokenizer, chars = options.detokenizer(choice), 0
        whole, listed = CompleteLogprobs(), [b"null"]
        for start in range(0, len(token_ids), size := max(_PIECE_ENTRIES // (1 + logprobs.top_count), 1)):
            ids = token_ids[start : start + size]
            # The first token has none: what is known of a token stands one place before it.
            known = logprobs.tokens(max(start - 1, 0), start + len(ids) - 1)
            if options.echo_logprobs is not None:
                shown = []
                for token_id, own in zip(ids, [*([None] if start == 0 else []), *known], strict=True):
                    shown.append(ShownToken(token_id, _first(own, options.echo_logprobs), min(chars, echo)))
                    chars += len(detokenizer.add((token_id,)))
                whole.add(self._shown(choice, shown))
            if options.prompt_logprobs is not None:
                counted = ids[1:] if start == 0 else ids
                listed += [self._entry(token_id, own) for token_id, own in zip(counted, known, strict=True)]
            await asyncio.sleep(0)
        prompt = options.prompt_of(choice)
        self._echoed[prompt] = whole
        self._listed[prompt] = msgspec.Raw(b"[%b]" % b",".join(listed))

    def _entry(self, token_id: int, own: TokenLogprobs) -> bytes:
        """Returns what is said of one token: an object with an entry for it, and for each of the likeliest."""
        entries = {str(token_id): self._token(token_id, own.chosen, own.rank)}
        for rank, (top_id, logprob) in enumerate(own.top[: self._options.prompt_logprobs], 1):
            entries.setdefault(str(top_id), self._token(top_id, logprob, rank))
        return _encoder.encode(entries)

    def _token(self, token_id: int, logprob: float, rank: int) -> PromptTokenLogprob:
        return PromptTokenLogprob(finite(logprob), rank, self._options.token_bytes(token_id).decode(errors="replace"))


def _first(own: TokenLogprobs | None, count: int) -> TokenLogprobs | None:
    """Returns the log probabilities with no more than ``count`` of the likeliest tokens."""
    if own is None or len(own.top) <= count:
        return own
    return TokenLogprobs(own.chosen, own.rank, own.top[:count])
