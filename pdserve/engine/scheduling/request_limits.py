"""Knows what the model allows a request: which requests it can compute at all, and when generation ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from pdserve.engine.request import Request
from pdserve.wire.engine import FinishReason
from pdserve.wire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptRule:
    """What a prompt has to satisfy. Each request is checked once, whichever channel it came by."""

    vocab_size: int
    max_model_len: int

    @property
    def max_prompt_tokens(self) -> int:
        """The length of the longest prompt with an answer, of which one token has to fit."""
        return self.max_model_len - 1

    def misfit(
        self, token_ids: list[int], sampling: SamplingParams, emitted: Sequence[Sequence[int]] = ()
    ) -> str | None:
        """Returns why this engine cannot compute the request, or None if it can.

        ``emitted`` has the tokens of each answer that its client has from another node.
        """
        if not token_ids:
            return "the prompt is empty"
        # The token that comes with a prompt's log probabilities needs no place: nothing follows it.
        only_scored = sampling.prompt_logprobs is not None and sampling.max_tokens == 1
        if len(token_ids) > (self.max_model_len if only_scored else self.max_prompt_tokens):
            return f"the prompt has {len(token_ids)} tokens; with one of output, at most {self.max_model_len} fit"
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            return f"a token id is outside 0 to {self.vocab_size - 1}"
        for answer in emitted:
            misfit = self._answer_misfit(len(token_ids), answer, sampling)
            if misfit is not None:
                return misfit
        return self._sampling_misfit(sampling)

    def _answer_misfit(self, prompt_tokens: int, emitted: Sequence[int], sampling: SamplingParams) -> str | None:
        most = min(sampling.max_tokens, self.max_model_len - prompt_tokens)
        if len(emitted) > most:
            return f"{len(emitted)} tokens of the answer were emitted, but at most {most} fit"
        if min(emitted, default=0) < 0 or max(emitted, default=0) >= self.vocab_size:
            return f"an emitted token id is outside 0 to {self.vocab_size - 1}"
        return None

    def _sampling_misfit(self, sampling: SamplingParams) -> str | None:
        biased = (token for token, _ in sampling.logit_bias)
        looked_up = [*sampling.allowed_token_ids, *biased, *sampling.logprob_token_ids]
        # A tokenizer may know more tokens than its model: to ban such a token, or to stop at it, changes nothing.
        banned = [*sampling.stop_token_ids, *chain.from_iterable(sampling.bad_words)]
        if min(looked_up, default=0) < 0 or max(looked_up, default=0) >= self.vocab_size or min(banned, default=0) < 0:
            return f"a token id of the sampling parameters is outside 0 to {self.vocab_size - 1}"
        return None


@dataclass(frozen=True, slots=True)
class StopRule:
    """When generation ends by the model's limits and the request's parameters."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def ending(self, request: Request) -> FinishReason | None:
        """Returns why the request ends with its last token, or None if it goes on."""
        sampling, token_id = request.sampling, request.token_ids[-1]
        # Where a grammar allows such a token although it is to be ignored, it allows nothing else.
        if token_id in self.eos_token_ids and not (sampling.ignore_eos and sampling.grammar is None):
            return FinishReason.STOP
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        length = len(request.token_ids)
        if length >= request.num_prompt_tokens + sampling.max_tokens or length >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def most_tokens(self, request: Request) -> int:
        """Returns how many tokens the request may have in the end, those of its prompt included."""
        return min(request.num_prompt_tokens + request.sampling.max_tokens, self.max_model_len)

    def next_is_last(self, request: Request) -> bool:
        """Returns whether the request's next token will be its last, whichever token it is."""
        length = len(request.token_ids) + 1
        return length >= request.num_prompt_tokens + request.sampling.max_tokens or length >= self.max_model_len
