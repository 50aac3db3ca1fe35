"""Reports log probabilities of sampled tokens, and of prompts' tokens, by the model's own distribution.

Those of sampled tokens are computed behind the logits, and are on their way to the host until they are read.

The model gives logits for every token of a prompt, but only as many of them at a time as memory holds: they come in
pieces while a step is computed. Of each piece only the numbers that are reported stay, on the device, until the step's
tokens are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdserve.engine.sampling.sampling_row import SamplingRow, row_groups
from pdserve.wire.sampling_params import PromptLogprobs, TokenLogprobs
from pdserve_kernels.host_copies import HostCopy, to_device


@dataclass(frozen=True, slots=True)
class _Reports:
    """What is reported of some rows: a number for each, ``most`` for each, and those of the tokens that are named."""

    rows: Sequence[SamplingRow]
    chosen: HostCopy
    ranks: HostCopy
    top_ids: HostCopy
    top: HostCopy
    named: HostCopy

    def read(self) -> list[TokenLogprobs]:
        parts = (self.chosen, self.ranks, self.top_ids, self.top)
        named = iter(self.named.read().tolist())
        reports = []
        for row, chosen, rank, ids, top in zip(self.rows, *(part.read().tolist() for part in parts), strict=True):
            asked = row.sampling.logprob_token_ids
            if asked:
                pairs = sorted(((token_id, next(named)) for token_id in asked), key=_by_likelihood)
            else:
                pairs = list(zip(ids, top, strict=True))[: row.sampling.logprobs]
            reports.append(TokenLogprobs(chosen, rank, tuple(pairs)))
        return reports


class PendingReports:
    """The reports of the rows that ask for them, to be read once."""

    def __init__(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], sources: Sequence[int], tokens: torch.Tensor
    ) -> None:
        """Reports ``tokens``, int64 ``[len(rows)]``. Row ``i`` was sampled from ``logits[sources[i]]``, in fp32.

        Does not wait for a GPU.
        """
        self._groups = [
            _reports(
                logits, [rows[at] for at in group], [sources[at] for at in group], tokens[group[0] : group[-1] + 1]
            )
            for group in row_groups(list(range(len(rows))), logits)
        ]

    def read(self) -> list[TokenLogprobs]:
        """Returns a report for each row. Waits for a GPU."""
        return [report for group in self._groups for report in group.read()]


def _reports(
    logits: torch.Tensor, rows: Sequence[SamplingRow], sources: Sequence[int], tokens: torch.Tensor
) -> _Reports:
    named = [(at, token_id) for at, row in enumerate(rows) for token_id in row.sampling.logprob_token_ids]
    most = max(0 if row.sampling.logprob_token_ids else row.sampling.logprobs or 0 for row in rows)
    places, at_row, at_token = to_device([sources, [at for at, _ in named], [each for _, each in named]], logits.device)
    own_logits = logits.index_select(0, places.long())
    normaliser = own_logits.logsumexp(-1, keepdim=True)
    own = own_logits.gather(1, tokens.unsqueeze(1))
    top_ids, top = likeliest(own_logits, normaliser, min(most, logits.shape[-1]))
    at_row = at_row.long()
    return _Reports(
        rows,
        HostCopy((own - normaliser).squeeze(1)),
        HostCopy((own_logits > own).sum(-1) + 1),
        HostCopy(top_ids),
        HostCopy(top),
        HostCopy(own_logits[at_row, at_token.long()] - normaliser[at_row, 0]),
    )


def likeliest(logits: torch.Tensor, normaliser: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids of each row's ``count`` likeliest tokens and their log probabilities, the likeliest first.

    Of equally likely tokens those with lower ids come first, so that the answer depends on neither device nor batch.
    """
    if not count:
        return tuple(logits.new_empty(len(logits), 0, dtype=kind) for kind in (torch.int64, logits.dtype))  # type: ignore[return-value]  # mypy does not count them
    ids = logits.topk(count).indices if count == logits.shape[-1] else _best_ids(logits, count)
    ids = ids.sort(-1).values
    logprobs, order = (logits.gather(1, ids) - normaliser).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), logprobs


def _best_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the ids of each row's best tokens, in any order."""
    # It is not defined which of several equal tokens topk takes. One more shows whether there are others.
    best, ids = logits.topk(count + 1)
    last, ids = best[:, count - 1 : count], ids[:, :count]
    # A GPU would be waited for.
    if logits.device.type == "cpu" and bool((last > best[:, count:]).all()):
        return ids
    size, above = logits.shape[-1], best[:, :count] > last
    every = torch.arange(size, dtype=torch.int32, device=logits.device)
    tied = torch.where(logits == last, every, size).topk(count, largest=False).values.long()
    place = torch.arange(count, device=logits.device) - above.sum(-1, keepdim=True)
    # Of a row that is not finite nothing is reported, but its ids have to exist.
    return torch.where(above, ids, tied.gather(1, place.clamp(min=0))).clamp(max=size - 1)


def _by_likelihood(pair: tuple[int, float]) -> tuple[float, int]:
    token_id, logprob = pair
    return -logprob, token_id


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
