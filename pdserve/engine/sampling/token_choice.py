"""Chooses the tokens of a step's rows: the best after the rules, or one that is drawn.

A row whose grammar leaves few tokens is chosen among those, and any other among the complete vocabulary.

To draw, the temperature and the ``filters`` are applied, and the distribution is inverted at one number a row. The
number is a hash of seed and position, so the token is the same alone or in a batch, on a prefill or a decode node, and
after a preemption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.sampling.filters import Logits, column, filter_few, filter_rows, vector
from pdserve.engine.sampling.grammar_matcher import TokenBits
from pdserve.engine.sampling.logit_rules import apply_rules, has_own_rules, moves_logits
from pdserve.engine.sampling.sampling_row import SamplingRow, row_groups
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.host_copies import to_device

MAX_BYTES = 512
"""More bytes of a mask that name tokens do not count as few: these can name 4,096 tokens."""

TokenIds = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would give the same token, or overflow."""

INVERSION_BLOCK = 256
"""First the block of so many tokens is found, then the token in it: a running sum over everything takes longer."""


class TokenChoice:
    """The tokens of a step while they are chosen."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        sources: Sequence[int],
        eos_token_ids: Set[int],
        tokens: list[int],
        finite: list[bool],
    ) -> None:
        """Row ``i`` is chosen from ``logits[sources[i]]``. ``tokens`` and ``finite`` say what is chosen so far."""
        self._logits, self._rows, self._sources, self._eos_token_ids = logits, rows, sources, eos_token_ids
        self.tokens = tokens
        self.finite = finite
        """Whether a row can have a token."""

    @classmethod
    def of_best(
        cls, logits: torch.Tensor, rows: Sequence[SamplingRow], sources: Sequence[int], eos_token_ids: Set[int]
    ) -> TokenChoice:
        """Begins with the best token of each row. Waits for a GPU."""
        best = logits.max(-1)
        indices, finite = best.indices.tolist(), best.values.isfinite().tolist()
        tokens, sane = [indices[source] for source in sources], [finite[source] for source in sources]
        return cls(logits, rows, sources, eos_token_ids, tokens, sane)

    def left(self, indices: Iterable[int]) -> list[int]:
        """Returns those of the rows that can have a token, in their order."""
        return sorted(index for index in indices if self.finite[index])

    def drop(self, indices: Iterable[int]) -> None:
        """Takes note that these rows can have no token."""
        for index in indices:
            self.finite[index] = False

    def choose(self, indices: Sequence[int], masks: Mapping[int, TokenBits | None], *, again: bool = False) -> None:
        """Chooses the tokens of these rows, by the masks of those that have one. ``again`` takes another number."""
        few: dict[int, TokenIds] = {}
        other = [] if masks else list(indices)
        for index in indices if masks else ():
            bits = masks.get(index)
            ids = None if bits is None or moves_logits(self._rows[index]) else few_tokens(bits)
            if ids is None:
                other.append(index)
            else:
                few[index] = ids
        self._choose_among_few(few, again)
        self._choose_among_all(other, masks, again)

    def _choose_among_few(self, tokens: Mapping[int, TokenIds], again: bool) -> None:
        if not tokens:
            return
        found = few_logits(self._logits, [self._sources[index] for index in tokens], list(tokens.values()))
        for (index, ids), logits in zip(tokens.items(), found, strict=True):
            number = self._uniform(index, again) if self._is_drawn(index) else None
            place = best_or_drawn(logits, self._rows[index].sampling, number)
            if place is None:
                self.drop([index])
            else:
                self.tokens[index] = int(ids[place])

    def _choose_among_all(self, indices: Sequence[int], masks: Mapping[int, TokenBits | None], again: bool) -> None:
        ruled = {index for index in indices if masks.get(index) is not None or has_own_rules(self._rows[index])}
        drawn = [index for index in indices if self._is_drawn(index)]

        def choosable(group: list[int]) -> torch.Tensor:
            own = group_logits(self._logits, [self._sources[index] for index in group])
            constrained = {at: bits for at, index in enumerate(group) if (bits := masks.get(index)) is not None}
            own, finite = after_rules(own, [self._rows[index] for index in group], self._eos_token_ids, constrained)
            without = [] if finite is None else [at for at, sane in enumerate(finite.tolist()) if not sane]
            if without:
                self.drop(group[at] for at in without)
                own[without] = 0.0
            return own

        for group in row_groups(sorted(ruled.difference(drawn)), self._logits):
            for index, token in zip(group, choosable(group).argmax(-1).tolist(), strict=True):
                self.tokens[index] = token
        for group in row_groups(drawn, self._logits):
            for index, token in zip(group, self._drawn(choosable(group), group, again).tolist(), strict=True):
                self.tokens[index] = token

    def _is_drawn(self, index: int) -> bool:
        return is_drawn(self._rows[index].sampling)

    def _drawn(self, logits: torch.Tensor, indices: Sequence[int], again: bool) -> torch.Tensor:
        uniforms = [self._uniform(index, again) for index in indices]
        return draw(logits, [self._rows[index].sampling for index in indices], uniforms)

    def _uniform(self, index: int, again: bool) -> float:
        row = self._rows[index]
        return uniform(row.sampling.seed, row.position, again=again)


def few_tokens(bits: TokenBits) -> TokenIds | None:
    """Returns the tokens that a mask names, in the order of their ids; None if they are many."""
    if np.count_nonzero(bits) > MAX_BYTES:
        return None
    return np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_))


def few_logits(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[TokenIds]) -> list[Logits]:
    """Returns the logits of each row's tokens, on the host. Waits for a GPU."""
    if logits.device.type == "cpu":
        on_host: Logits = logits.numpy()
        return [on_host[row][ids] for row, ids in zip(rows, tokens, strict=True)]
    counts = [len(ids) for ids in tokens]
    places = to_device([np.repeat(rows, counts).tolist(), np.concatenate(tokens).tolist()], logits.device)
    picked: Logits = logits[places[0].long(), places[1].long()].cpu().numpy()
    return np.split(picked, np.cumsum(counts)[:-1])


def group_logits(logits: torch.Tensor, sources: Sequence[int]) -> torch.Tensor:
    """Returns a copy of these rows, which may be changed. It stays in a CPU's caches until the choice."""
    if logits.device.type == "cpu":
        return torch.stack([logits[source] for source in sources])
    (places,) = to_device([sources], logits.device)
    return logits.index_select(0, places.long())


def after_rules(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    eos_token_ids: Set[int],
    masks: Mapping[int, TokenBits],
    last: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a group's logits after the rows' rules, and which rows can have a token; None if no rule changes that.

    ``logits`` itself may be changed. ``last`` is that of ``apply_rules``. Does not wait for a GPU.
    """
    if not masks and not any(has_own_rules(row) for row in rows):
        return logits, None
    logits = apply_rules(logits, rows, eos_token_ids, masks, last)
    return logits, logits.amax(-1).isfinite()


def is_drawn(sampling: SamplingParams) -> bool:
    """Returns whether a token is drawn; otherwise it is the best one."""
    return sampling.temperature >= GREEDY_BELOW


def uniform(seed: int, position: int, *, again: bool = False) -> float:
    """Returns a number in [0, 1), the same on every machine; for a second draw at one position, another one."""
    digest = hashlib.blake2b(f"{seed}:{position}{':again' if again else ''}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits: torch.Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """Draws a token for each row of ``logits`` (fp32 ``[rows, vocab_size]``, overwritten) by the row's parameters.

    Returns token ids, int64 ``[rows]``, on the device of ``logits``. Waits for a GPU only where a row has a top-p.
    """
    # The shift comes first, so that a small temperature cannot overflow.
    logits -= logits.amax(-1, keepdim=True)
    logits /= column(logits, [params.temperature for params in sampling])
    return _invert(filter_rows(logits.softmax(-1), logits, sampling), uniforms)


def guess(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Guesses the token of each row, at these positions of answers, by another model's ``logits`` of it.

    It is drawn by the number that will draw the token: so where both distributions agree, the tokens are the same.
    Rules that look back count for nothing.

    Returns token ids, int64 ``[rows]``, and whether the logits of each row are finite, both on the device of
    ``logits`` (fp32 ``[rows, vocab_size]``). Waits for a GPU where ``draw`` does.
    """
    best = logits.max(-1)
    tokens, finite = best.indices.clone(), best.values.isfinite()
    drawn = [row for row, params in enumerate(sampling) if is_drawn(params)]
    for group in row_groups(drawn, logits):
        (places,) = to_device([group], logits.device)
        own = group_logits(logits, group).masked_fill_(~finite.index_select(0, places).unsqueeze(1), 0.0)
        params = [sampling[row] for row in group]
        uniforms = [uniform(sampling[row].seed, positions[row]) for row in group]
        tokens.index_copy_(0, places.long(), draw(own, params, uniforms))
    return tokens, finite


def best_or_drawn(logits: Logits, sampling: SamplingParams, uniform: float | None) -> int | None:
    """Returns the place of the best of a few tokens, or with ``uniform`` of that at which the distribution passes it.

    Returns None if none of the logits is finite, or one of them is not a number.
    """
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return None
    if uniform is None:
        return best
    weights = np.exp((logits.astype(np.float64) - logits[best]) / sampling.temperature)
    filter_few(weights, logits, sampling)
    ends = weights.cumsum()
    last = int(ends.searchsorted(ends[-1]))
    return min(int(ends.searchsorted(uniform * ends[-1], side="right")), last)


def _invert(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """Returns the tokens at which the cumulative distributions pass these numbers."""
    missing = -weights.shape[-1] % INVERSION_BLOCK
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    blocks = padded.view(len(weights), -1, INVERSION_BLOCK)
    ends = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    wanted = ends[:, -1:] * vector(weights, uniforms).unsqueeze(1)
    block = _passed(ends, wanted)
    left = wanted - torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks.take_along_dim(block.unsqueeze(-1), 1).squeeze(1).cumsum(-1, dtype=torch.float64)
    at = _passed(inside, left)
    return (block * INVERSION_BLOCK + at).squeeze(1)


def _passed(ends: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns the first place in each row where the running sum is above ``wanted``, or where it stops rising."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(ends, wanted, right=True), last)
