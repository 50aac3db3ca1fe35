"""Reports log probabilities of sampled tokens by the model's own distribution.

They are computed behind the logits, and are on their way to the host until they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdserve.engine.sampling.host_copy import HostCopy
from pdserve.engine.sampling.row_groups import row_groups
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.wire.sampling_params import TokenLogprobs
from pdserve_kernels.host_copies import to_device


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
