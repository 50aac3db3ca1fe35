"""Drafts tokens behind those of a step, one after another, by the layer of the model that is made for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from pdserve.models.decoder import Drafter
from pdserve.models.rank_cache import StepCache
from pdserve.models.tp.shares import TpGroup
from pdserve_kernels.contract import AttentionRow
from pdserve_kernels.host_copies import to_device

Choose: TypeAlias = Callable[[torch.Tensor, Sequence[int], int], torch.Tensor]
"""Returns the drafts, int ``[rows]``, of fp32 logits ``[rows, vocab_size]``, on their device.

It is given the place of each row among those that want drafts, and how many drafts the row has already.
"""


def likeliest(logits: torch.Tensor, rows: Sequence[int], number: int) -> torch.Tensor:
    """Satisfies ``Choose`` with the likeliest tokens."""
    return logits.argmax(-1)


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Tokens of a step whose next tokens are known: those at the positions from ``start`` on."""

    start: int
    first: int
    """The place of the first one among the tokens of the step."""
    next_tokens: Sequence[int]
    block_table: Sequence[int]
    wanted: bool
    """Whether drafts are wanted of what follows the last next token."""

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + len(self.next_tokens)


class Drafting:
    """The drafts of one rank."""

    def __init__(
        self,
        drafter: Drafter,
        plan: Callable[[Sequence[AttentionRow]], StepCache],
        block_size: int,
        max_positions: int,
        tp: TpGroup,
    ) -> None:
        """``plan`` returns the cache as rows use it, of which those with a single token come first."""
        self._drafter, self._plan, self._tp = drafter, plan, tp
        self._block_size, self._max_positions = block_size, max_positions

    def __call__(
        self,
        hidden: torch.Tensor,
        rows: Sequence[KnownTokens],
        count: int = 0,
        choose: Choose = likeliest,
        tokens: torch.Tensor | None = None,
    ) -> list[list[int]]:
        """Returns up to ``count`` drafts for each row that wants some, and writes the cache of all rows.

        ``hidden``, ``[tokens, hidden_size]``, are the hidden states of the step that the model computed. Rank 0 alone
        asks its ``choose``. ``tokens`` on the device take the place of the last next tokens of the first rows.
        """
        if not rows:
            return []
        # The order of a step: attention takes rows of a single token first.
        ordered = sorted(range(len(rows)), key=lambda i: len(rows[i].next_tokens) > 1)
        last, end = dict[int, int](), 0
        for i in ordered:
            end += len(rows[i].next_tokens)
            last[i] = end - 1
        wanting = [i for i, row in enumerate(rows) if row.wanted and count > 0]
        known = [rows[i] for i in ordered]
        token_ids, positions, places, wanted = to_device(
            [
                [token for row in known for token in row.next_tokens],
                [position for row in known for position in range(row.start, row.end)],
                [place for row in known for place in range(row.first, row.first + len(row.next_tokens))],
                [last[i] for i in wanting],
            ],
            hidden.device,
        )
        if tokens is not None:
            (late,) = to_device([[last[i] for i in range(len(tokens))]], hidden.device)
            token_ids.index_copy_(0, late.long(), tokens.to(token_ids.dtype))
        begun = self._drafter.begun(hidden.index_select(0, places))
        cache = self._plan([AttentionRow(len(row.next_tokens), row.end, row.block_table) for row in known])
        state = self._drafter.forward(token_ids, begun, positions, cache)
        if not wanting:
            return []
        return self._drafted(state.index_select(0, wanted), [rows[i] for i in wanting], count, choose)

    def _drafted(self, state: torch.Tensor, rows: Sequence[KnownTokens], count: int, choose: Choose) -> list[list[int]]:
        """Returns the drafts of ``rows``, whose last hidden states are ``state``, ``[rows, hidden_size]``."""
        device = state.device
        # The first draft of a row needs no place in the cache, and each further one that of the draft before it.
        most = [1 + min(self._max_positions, len(row.block_table) * self._block_size) - row.end for row in rows]
        going, found = list(range(len(rows))), list[tuple[list[int], torch.Tensor]]()
        for number in range(1, count + 1):
            tokens = self._chosen(state, going, number - 1, choose)
            found.append((going, tokens))
            staying = [place for place, i in enumerate(going) if min(count, most[i]) > number]
            if not staying:
                break
            going = [going[place] for place in staying]
            # Drafts are counted from 1, so that they are at the positions from the end of the known ones on.
            ends = [rows[i].end + number - 1 for i in going]
            kept, positions = to_device([staying, ends], device)
            cache = self._plan(
                [AttentionRow(1, end + 1, rows[i].block_table) for i, end in zip(going, ends, strict=True)]
            )
            state = self._drafter.forward(tokens.index_select(0, kept), state.index_select(0, kept), positions, cache)
        drafts: list[list[int]] = [[] for _ in rows]
        values = iter(torch.cat([tokens for _, tokens in found]).tolist())
        for drafted, _ in found:
            for i in drafted:
                drafts[i].append(next(values))
        return drafts

    def _chosen(self, state: torch.Tensor, rows: Sequence[int], number: int, choose: Choose) -> torch.Tensor:
        """Returns the draft with this number of each row, int32 ``[rows]``, on all ranks."""
        logits = self._drafter.logits(state)
        if self._tp.size == 1:
            return choose(logits, rows, number).int()
        # Rank 0 alone has logits. The sum of its tokens and of zeros tells the others; fp32 has ids up to 2**24.
        rank0 = self._tp.rank == 0
        tokens = choose(logits, rows, number).float() if rank0 else logits.new_zeros(len(state), dtype=torch.float32)
        return self._tp.all_reduce(tokens).int()
