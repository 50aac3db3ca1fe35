"""Which requests an engine can compute at all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from pdserve.wire.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptRule:
    """Checked once for each request, whichever channel it came by."""

    vocab_size: int
    max_model_len: int

    @property
    def max_prompt_tokens(self) -> int:
        """One token of output has to fit, too."""
        return self.max_model_len - 1

    def misfit(self, token_ids: list[int], sampling: SamplingParams) -> str | None:
        """Why this engine cannot compute the request; None if it can."""
        if not token_ids:
            return "the prompt is empty"
        if len(token_ids) > self.max_prompt_tokens:
            return f"the prompt has {len(token_ids)} tokens; with one of output, at most {self.max_model_len} fit"
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            return f"a token id is outside 0 to {self.vocab_size - 1}"
        return self._sampling_misfit(sampling)

    def _sampling_misfit(self, sampling: SamplingParams) -> str | None:
        looked_up = [*sampling.allowed_token_ids, *(token for token, _ in sampling.logit_bias)]
        # A tokenizer may know more tokens than its model: to ban or to stop at one of those means nothing, and is fine.
        banned = [*sampling.stop_token_ids, *chain.from_iterable(sampling.bad_words)]
        if min(looked_up, default=0) < 0 or max(looked_up, default=0) >= self.vocab_size or min(banned, default=0) < 0:
            return f"a token id of the sampling parameters is outside 0 to {self.vocab_size - 1}"
        return None
