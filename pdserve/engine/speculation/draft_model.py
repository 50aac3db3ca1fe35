"""Has a smaller model with the same tokeniser guess what may follow an answer (``--draft-model``).

It lies beside the model on rank 0's device, with weights and a KV cache of its own. Where drafts of a request are
wanted, it reads what is new of the request's text, writing over the drafts that were wrong, and goes on from there. A
long text is read in parts, in several steps, and there are no drafts before its end. What is kept of a request can be
read again at any time. So it is dropped when the request ends, waits or leaves, or when others need the room.

A draft is drawn as the answer's token will be: from this model's distribution, by the same number, which is a function
of seed and position. So where the models agree, their tokens are the same at any temperature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from pdserve.engine.request import Request, Status
from pdserve.engine.sampling.token_choice import guess
from pdserve.models.runner import ModelRunner, StepRow

_NOT_FINITE = -1


@dataclass(slots=True)
class _Kept:
    """What the draft model's cache has of one request."""

    blocks: list[int] = field(default_factory=list)
    num_read: int = 0
    """So many of the request's first tokens are in the cache."""
    drafted: list[int] = field(default_factory=list)
    """The drafts behind those that are in the cache as well."""

    def settle(self, tokens: Sequence[int]) -> None:
        """Takes the drafts that were right for read, and leaves at least the last of ``tokens`` to be read."""
        for place, draft in enumerate(self.drafted, self.num_read):
            if place >= len(tokens) or tokens[place] != draft:
                break
            self.num_read += 1
        self.num_read = min(self.num_read, len(tokens) - 1)
        self.drafted.clear()


class DraftModel:
    """The draft model of one engine. It keeps ``num_blocks`` blocks of its runner's cache for its requests."""

    def __init__(
        self,
        runner: ModelRunner,
        block_size: int,
        num_blocks: int,
        max_positions: int,
        vocab_size: int,
        most_drafts: int,
    ) -> None:
        """The draft model knows ``max_positions``, and the model that it drafts for has ``vocab_size`` tokens.

        A step checks ``most_drafts`` of a request at most.
        """
        self._many = 1 + most_drafts
        self.runner, self._block_size = runner, block_size
        self.max_positions, self._vocab_size = max_positions, vocab_size
        self._free = list(range(num_blocks))
        self._kept: dict[Request, _Kept] = {}
        """Those that were used last come last."""
        self.num_runs = self.num_read = 0
        """How many runs the last call of ``draft`` took, and how many tokens it read if these were more than steps
        give."""

    @property
    def num_free(self) -> int:
        """The number of blocks that no request has."""
        return len(self._free)

    def forget_ended(self) -> None:
        """Gives back the blocks of requests that have ended, or wait."""
        self._drop(request for request in self._kept if request.ended or request.status is not Status.RUNNING)

    @torch.inference_mode()
    def draft(self, requests: Sequence[Request], count: int, most_read: int) -> list[list[int]]:
        """Returns up to ``count`` drafts of what follows the tokens of each request. Waits for a GPU.

        All requests decode. It reads ``most_read`` of their tokens at most, of all together. A request has no drafts
        while its text is not read to the end, without room for its text, and behind logits that are not finite.
        """
        self.forget_ended()
        self.num_runs = self.num_read = 0
        drafts: dict[Request, list[int]] = {request: [] for request in requests}
        rows = self._rows(requests, count, most_read) if count else {}
        if not rows:
            return list(drafts.values())
        # The order of a step: rows of a single token come first.
        going = sorted(rows, key=lambda request: len(rows[request].token_ids) > 1)
        logits, self.num_runs = self.runner.run([rows[request] for request in going]), 1
        going = [request for request in going if rows[request].wants_logits]
        found = list[torch.Tensor]()
        for number in range(count if going else 0):
            found.append(self._chosen(logits, going, number))
            if number == count - 1:
                break
            places = [len(request.token_ids) + number for request in going]
            tables = [self._kept[request].blocks for request in going]
            steps = [StepRow([0], place, table, True) for place, table in zip(places, tables, strict=True)]
            logits = self.runner.run(steps, found[-1].clamp(min=0))
            self.num_runs += 1
        chosen = torch.stack(found).T.tolist() if found else []
        for request, tokens in zip(going, chosen, strict=True):
            self._take(request, tokens, drafts[request])
        return list(drafts.values())

    def _rows(self, requests: Sequence[Request], count: int, left: int) -> dict[Request, StepRow]:
        """Returns what is to be read of each request, for which there is room, and for the drafts behind it."""
        rows, wanted, read, long = dict[Request, StepRow](), set(requests), 0, False
        for request in requests:
            tokens, kept = request.token_ids, self._kept.pop(request, None) or _Kept()
            self._kept[request] = kept
            kept.settle(tokens)
            start, end = kept.num_read, min(len(tokens), kept.num_read + left)
            ends = end == len(tokens)
            places = end + count - 1 if ends else end
            if end == start or places > self.max_positions or not self._make_room(kept, places, wanted):
                continue
            left, read = left - (end - start), read + end - start
            long |= not ends or end - start > self._many
            rows[request] = StepRow(tokens[start:end], start, kept.blocks, ends)
            kept.num_read = end
        self.num_read = read if long else 0
        return rows

    def _make_room(self, kept: _Kept, tokens: int, wanted: set[Request]) -> bool:
        """Returns whether there are blocks for so many tokens. Others than those ``wanted`` may lose theirs for it."""
        missing = -(-tokens // self._block_size) - len(kept.blocks)
        while missing > len(self._free):
            other = next((request for request in self._kept if request not in wanted), None)
            if other is None:
                return False
            self._drop([other])
        kept.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _drop(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            self._free += self._kept.pop(request).blocks

    def _take(self, request: Request, tokens: Sequence[int], drafts: list[int]) -> None:
        """Takes the drafts of a request, up to one without finite logits."""
        finite = tokens.index(_NOT_FINITE) if _NOT_FINITE in tokens else len(tokens)
        drafts += tokens[:finite]
        kept = self._kept[request]
        if finite < len(tokens):
            # Who has these blocks next must not read what is not finite.
            self.runner.clear(kept.blocks)
            self._drop([request])
        else:
            # The last draft was never read.
            kept.drafted += tokens[:-1]

    def _chosen(self, logits: torch.Tensor, requests: Sequence[Request], number: int) -> torch.Tensor:
        """Returns the draft with this number of each request, int64 ``[requests]``, on the device.

        It is ``_NOT_FINITE`` where the logits are not.
        """
        positions = [request.num_generated_tokens + number for request in requests]
        tokens, finite = guess(logits[:, : self._vocab_size], [request.sampling for request in requests], positions)
        return tokens.where(finite, _NOT_FINITE)
