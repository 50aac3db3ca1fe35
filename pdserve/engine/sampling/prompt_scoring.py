"""Finds the log probabilities of prompts' tokens, from logits that come in pieces while a step is computed.

The model gives logits for every token of a prompt, but only as many of them at a time as memory holds. Of each piece
only the numbers that are reported are kept, on the device, until the step's tokens are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdserve.engine.sampling.logprobs import likeliest
from pdserve.wire.prompt_logprobs import PromptLogprobs
from pdserve_kernels.host_copies import to_device


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of one prompt that follow each other, of which a step gives the log probabilities."""

    token_ids: Sequence[int]
    top_count: int
    """The number of likeliest tokens to report beside each."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """What one piece of logits says: tensors with one row for each token."""

    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


class PendingScores:
    """The log probabilities of the prompts' tokens of one step, to be read once."""

    def __init__(self, spans: Sequence[ScoredTokens]) -> None:
        """The logits before each token come in the order of ``spans``."""
        self._spans = spans
        self._token_ids = [token_id for span in spans for token_id in span.token_ids]
        self._most = max(span.top_count for span in spans)
        self._taken = 0
        self._pieces: list[_Scores] = []

    def add(self, logits: torch.Tensor) -> None:
        """Takes the next piece of logits, fp32 ``[tokens, vocab_size]``, which need not stay. Waits for no GPU."""
        end = self._taken + len(logits)
        column = to_device([self._token_ids[self._taken : end]], logits.device)[0].long().unsqueeze(1)
        self._taken = end
        normaliser = logits.logsumexp(-1, keepdim=True)
        own = logits.gather(1, column)
        top_ids, top = likeliest(logits, normaliser, min(self._most, logits.shape[-1]))
        ranks = (logits > own).sum(-1) + 1
        self._pieces.append(_Scores((own - normaliser).squeeze(1), ranks, top_ids, top))

    def read(self) -> list[PromptLogprobs]:
        """Returns what is known of the tokens of each span. Waits for a GPU."""
        pieces = self._pieces
        chosen = torch.cat([piece.chosen for piece in pieces]).cpu()
        ranks = torch.cat([piece.ranks for piece in pieces]).int().cpu()
        top_ids = torch.cat([piece.top_ids for piece in pieces]).int().cpu()
        top_logprobs = torch.cat([piece.top_logprobs for piece in pieces]).cpu()
        read, start = [], 0
        for span in self._spans:
            rows, count = slice(start, start + len(span.token_ids)), min(span.top_count, top_ids.shape[-1])
            start = rows.stop
            read.append(
                PromptLogprobs(
                    span.top_count,
                    _packed(chosen[rows]),
                    _packed(ranks[rows]),
                    _packed(top_ids[rows, :count]),
                    _packed(top_logprobs[rows, :count]),
                )
            )
        return read


def _packed(numbers: torch.Tensor) -> bytes:
    """Returns 32-bit numbers as ``PromptLogprobs`` has them."""
    array = numbers.contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
