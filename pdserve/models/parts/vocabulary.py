"""The two ends of a model, split over the ranks by the vocabulary: the embedding, and the head."""

from __future__ import annotations

from itertools import count

import torch
import torch.nn.functional as F

from pdserve.errors import ModelError
from pdserve.models.parts.projections import Building
from pdserve.models.recipe import LearnedPositions, ModelRecipe
from pdserve.models.tp.shares import TpGroup, vocab_part, vocab_share
from pdserve_kernels.contract import BlockWeight, Linear, UnreadWeight


class VocabParallelEmbedding:
    """The embedding. Each rank holds the vectors of a part of the vocabulary."""

    def __init__(
        self, building: Building, name: str, shape: tuple[int, int], part_name: str = "", *, further: int = 0
    ) -> None:
        """Takes the tensor ``name``, which has ``shape``, ``(vocab_size, hidden_size)``, as a whole.

        ``further`` rows behind these are not read. With a ``part_name``, it may be several tensors, one behind the
        other, with their numbers in place of ``{}``.
        """
        self._tp = building.tp
        self._part = vocab_share(self._tp, shape[0])
        if part_name and building.checkpoint.has(f"{part_name.replace('{}', '0')}.weight"):
            weight: UnreadWeight | BlockWeight = _of_parts(building, part_name, shape, self._part)
        else:
            weight = building.weight(f"{name}.weight", (shape[0] + further, shape[1]), rows=self._part)
        self.key = weight.key
        self.table = building.table(weight)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._tp.size == 1:
            return self._vectors(token_ids)
        mine = (token_ids >= self._part.start) & (token_ids < self._part.stop)
        vectors = self._vectors((token_ids - self._part.start).where(mine, 0))
        return self._tp.all_reduce(vectors.masked_fill(~mine.unsqueeze(-1), 0))

    def _vectors(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.table) if isinstance(self.table, torch.Tensor) else self.table.rows(ids)


def _of_parts(building: Building, part_name: str, shape: tuple[int, int], mine: slice) -> UnreadWeight:
    """Returns this rank's rows of a tensor that is stored in parts. Raises ModelError if they have another shape."""
    checkpoint, taken, first = building.checkpoint, list[UnreadWeight](), 0
    for number in count():
        name = f"{part_name.replace('{}', str(number))}.weight"
        if not checkpoint.has(name):
            break
        rows, end = checkpoint.shape(name)[0], first + checkpoint.shape(name)[0]
        own = slice(max(first, mine.start), min(end, mine.stop))
        if own.start < own.stop:
            place = slice(own.start - first, own.stop - first)
            taken.append(checkpoint.take_unread(name, (rows, shape[1]), place))
        else:
            checkpoint.leave(name, (rows, shape[1]))
        first = end
    if first != shape[0]:
        raise ModelError(f"{checkpoint.path}: {part_name!r} have {first} rows together, and {shape[0]} are needed")

    def read() -> torch.Tensor:
        # All parts beside the whole would be the largest tensor of a model twice.
        whole = torch.empty(mine.stop - mine.start, shape[1], dtype=checkpoint.dtype, device=checkpoint.device)
        for rows, part in zip(torch.split(whole, [part.shape[0] for part in taken]), taken, strict=True):
            rows.copy_(part.read())
        return whole

    key = " ".join(part.key for part in taken)
    return UnreadWeight(key, (mine.stop - mine.start, shape[1]), checkpoint.dtype, read, tuple(taken))


class VocabParallelHead:
    """The head. Each rank computes the logits of a part of the vocabulary, and rank 0 gets all of them."""

    def __init__(
        self,
        tp: TpGroup,
        linear: Linear,
        vocab_size: int,
        scale: float = 1.0,
        cap: float | None = None,
        *,
        precise: bool = False,
    ) -> None:
        """Takes the product with this rank's rows of the weight, which is in fp32 if it is ``precise``.

        ``ModelRecipe`` explains ``scale`` and ``cap``.
        """
        self._scale, self._cap, self._precise = scale, cap, precise
        self._tp, self._vocab_size = tp, vocab_size
        mine = vocab_share(tp, vocab_size)
        self._padding = vocab_part(tp, vocab_size) - (mine.stop - mine.start)
        self._linear = linear

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps ``[rows, hidden_size]`` to fp32 ``[rows, vocab_size]``, on ranks other than 0 to ``[rows, 0]``."""
        part = self._linear(hidden.float() if self._precise else hidden)
        if self._padding:
            part = F.pad(part, (0, self._padding))
        logits = self._tp.gather(part)[:, : self._vocab_size].float()
        # In place: the logits of many rows take more memory than all else of a step.
        if self._scale != 1.0:
            logits.mul_(self._scale)
        return logits if self._cap is None else logits.div_(self._cap).tanh_().mul_(self._cap)


def vocab_parallel_head(
    building: Building, embedding: VocabParallelEmbedding, shape: tuple[int, int], recipe: ModelRecipe
) -> VocabParallelHead:
    """Returns the head, of ``shape``: with the embedding's weight if the recipe ties them, or with its own.

    A tied head has its own too if the checkpoint has another one in spite of the configuration. transformers does the
    same: such a checkpoint's configuration is wrong, and its tensors are not.
    """
    name, part = f"{recipe.head}.weight", vocab_share(building.tp, shape[0])
    bias = building.checkpoint.take(f"{recipe.head}.bias", shape[:1], rows=part) if recipe.head_biased else None
    precise = recipe.precise_head and not recipe.tied
    if precise:
        weight = building.checkpoint.take(name, shape, rows=part, dtype=torch.float32)
        linear: Linear = building.kernels.linear(weight, bias)
    elif not recipe.tied:
        linear = building.linear(building.weight(name, shape, rows=part), bias)
    else:
        linear = _tied_head(building, embedding, building.checkpoint.take_optional(name, shape, rows=part), bias)
    return VocabParallelHead(building.tp, linear, shape[0], recipe.logits_scale, recipe.logits_cap, precise=precise)


def _tied_head(
    building: Building, embedding: VocabParallelEmbedding, own: torch.Tensor | None, bias: torch.Tensor | None
) -> Linear:
    table = embedding.table
    if not isinstance(table, torch.Tensor):
        assert bias is None, "no family with weights in blocks has a head with a bias"
        return table if own is None else building.linear(own)
    # Before weights are read, what they are is not known.
    if own is not None and not own.is_meta and not torch.equal(own, table):
        return building.linear(own, bias)
    outer, inner = table.shape
    return building.linear(UnreadWeight(embedding.key, (outer, inner), table.dtype, lambda: table), bias)


class PositionTable:
    """A vector for each position, which every rank holds."""

    def __init__(self, building: Building, positions: LearnedPositions, hidden_size: int, last: int) -> None:
        """Takes the vectors of the positions before ``last``."""
        rows = slice(positions.offset, positions.offset + last)
        self._table = building.checkpoint.take(f"{positions.name}.weight", (positions.rows, hidden_size), rows)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens]`` to ``[tokens, hidden_size]``."""
        return self._table[positions]
