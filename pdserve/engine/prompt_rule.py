"""Which prompts an engine can compute at all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptRule:
    """Checked once for each request, whichever channel it came by."""

    vocab_size: int
    max_model_len: int

    @property
    def max_prompt_tokens(self) -> int:
        """One token of output has to fit, too."""
        return self.max_model_len - 1

    def misfit(self, token_ids: list[int]) -> str | None:
        """Why this engine cannot compute the prompt; None if it can."""
        if not token_ids:
            return "the prompt is empty"
        if len(token_ids) > self.max_prompt_tokens:
            return f"the prompt has {len(token_ids)} tokens; with one of output, at most {self.max_model_len} fit"
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            return f"a token id is outside 0 to {self.vocab_size - 1}"
        return None
