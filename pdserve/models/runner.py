"""Runs one scheduled step on one rank: rows in, logits out.

Decode steps are captured once for each size and then replayed, so that no kernel is launched one by one: a step of a
small model on a fast GPU takes less time than launching its some hundred kernels from Python. The inputs of a captured
step are fixed tensors; what changes from step to step is their contents. Where only single-token rows are computed,
their number is padded to the next bucket; rows of padding store nothing and read nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter, is_
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pdserve.config import Dtype, KvCacheDtype
from pdserve.models.backend import CPU
from pdserve.models.block_plan import BlockStep, HeadBlockStep
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FamilyConfig
from pdserve.models.checkpoint.weights import Checkpoint
from pdserve.models.decoder import build_decoder
from pdserve.models.drafting import Choose, Drafting, KnownTokens, likeliest
from pdserve.models.latent_plan import LatentStep, plan_latents, sparse_form
from pdserve.models.parts.projections import Building
from pdserve.models.rank_cache import (
    TORCH_DTYPES,
    KvGroup,
    RankCache,
    StateGroup,
    StepCache,
    StepStates,
    on_device,
    run_numbers,
    state_runs,
)
from pdserve.models.shared_plan import SharedStep
from pdserve.models.tp.shares import ALONE, TpGroup
from pdserve_kernels.contract import (
    Attention,
    AttentionRow,
    BlockKernels,
    DecodeTables,
    GraphKernels,
    Kernels,
    StateRuns,
)
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.host_copies import Numbers, block_ids, joined, packed, packed_starts, to_device


class StepRow(msgspec.Struct, frozen=True):
    """One request's part of a step: its tokens ``start`` to ``start + len(token_ids)`` are computed.

    ``block_table`` covers at least all of them. ``wants_logits`` asks for the logits after the last one.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    wants_logits: bool
    scored: range = range(0)
    """The places among ``token_ids`` after which a prompt's next token is scored, so that the logits are wanted."""
    others: Sequence[Sequence[int]] = ()
    """The tables of the groups of the cache behind the first one.

    Of a group with a window, ids by the number of the block, -1 for a block that the tokens do not see. Of a group of
    states, the id of the state to begin with, -1 if the request has none yet, and that of the state to write. A row
    that begins with what the row before it writes, and writes another block, leaves that state as it is.
    """

    @property
    def context_len(self) -> int:
        return self.start + len(self.token_ids)

    def table(self, group: int) -> Sequence[int]:
        return self.others[group - 1] if group else self.block_table


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What has become known of a row of the last step: the tokens behind its first ones.

    ``next_tokens`` are those behind its first ``len(next_tokens)`` tokens, at least one: behind all tokens of a chunk,
    or behind those that are accepted. ``wanted`` asks for drafts of the tokens behind the last of them.
    """

    row: int
    """The number of the row in the step."""
    next_tokens: Sequence[int]
    wanted: bool
    block_table: Sequence[int] | None = None
    """The blocks of the row; None if they are those that it had in the step."""


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """What drafts need of a step that was computed."""

    rows: Sequence[StepRow]
    hidden: torch.Tensor
    """The hidden states of the step's tokens, ``[tokens or more, hidden_size]``."""


FEW_ROWS = (1, 2, 4)
FINE_STEP, COARSE_STEP = 8, 64
COARSE_ABOVE = 128
"""Above this number of rows, a step computes so much that 64 rows of padding do not matter."""


def decode_buckets(max_rows: int) -> list[int]:
    """Returns 1, 2, 4, 8, 16, 24 and so on, up to ``max_rows``, which is the last one."""
    sizes = [*FEW_ROWS, *range(FINE_STEP, COARSE_ABOVE, FINE_STEP), *range(COARSE_ABOVE, max_rows, COARSE_STEP)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """Returns the smallest bucket that holds so many rows, or None if none does."""
    at = bisect_left(buckets, rows)
    return buckets[at] if at < len(buckets) else None


Score: TypeAlias = Callable[[torch.Tensor], None]
"""Takes fp32 logits ``[tokens, vocab_size]``, which are not kept; on ranks other than 0 ``[tokens, 0]``."""

PADDING_SLOT = -1


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """The blocks of one group that a decode step writes and reads, as int32 tensors on the device."""

    slots: torch.Tensor
    """``[rows]``: where each new token is stored."""
    tables: DecodeTables


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of one decode step on the device: int32 tensors with one value for each row."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: tuple[DecodeBlocks, ...]
    """Each group of keys and values that has layers has one."""
    states: tuple[StateRuns, ...]
    """Each group of states has one."""


class Graph(Protocol):
    """A computation that is recorded once."""

    def capture(self, compute: Callable[[], None]) -> None:
        """Records ``compute``, which reads and writes tensors that stay."""

    def replay(self) -> None:
        """Runs what was recorded, on the present contents of its inputs."""


class CudaGraphs:
    """Makes graphs that share one pool of memory. Only one of them may be used at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self) -> CudaGraph:
        return CudaGraph(self._pool)


class CudaGraph:
    """Satisfies ``Graph``."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], None]) -> None:
        # On first use kernels are compiled and libraries allocate memory, which cannot be recorded.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotation
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()

    def replay(self) -> None:
        self._graph.replay()


class DecodeGraphs:
    """The captured decode steps of one model, and the tensors they read."""

    def __init__(
        self,
        compute: Callable[[DecodeInputs], torch.Tensor],
        make_graph: Callable[[], Graph],
        max_rows: int,
        max_model_len: int,
        attention: Sequence[KvGroup],
        states: Sequence[StateGroup],
        device: torch.device,
        linked: bool = False,
    ) -> None:
        """Captures ``compute``, which gives one row of logits for each of its inputs, for every bucket.

        ``attention`` and ``states`` are the groups of the cache that have layers. ``linked`` has each bucket captured
        twice if there are states: the second time for steps in which rows go on with each other's states, as drafts do.
        """
        self._compute = compute
        self._buckets = decode_buckets(max_rows)
        self._attention, self._states = [GroupTables(group) for group in attention], states
        fixed = 3 + 2 * len(attention) + 4 * len(states)
        tables = [max_rows * (group.most_blocks(max_model_len) + _ROOM) for group in reversed(attention)]
        self._starts = packed_starts([max_rows + 1] * fixed + tables)
        self._buffer = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
        self._runs = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._fill([], max_rows)
        # All graphs share one result: results of their own would take max_rows * vocab_size numbers for every bucket.
        self._logits = torch.empty_like(compute(self._inputs(max_rows)))
        # The largest comes first: the others then fit into the memory that it took.
        kinds = (False, True) if linked and states else (False,)
        self._graphs = {(bucket, kind): make_graph() for bucket in reversed(self._buckets) for kind in kinds}
        for (bucket, kind), graph in self._graphs.items():
            self._fill([], bucket, kind)
            graph.capture(partial(self._run, bucket, kind))

    def run(self, rows: Sequence[StepRow], tokens: torch.Tensor | None = None) -> torch.Tensor | None:
        """Returns the logits of each row, valid until the next call, or None if there is no graph for such a step.

        ``tokens`` on the device take the place of those of the first rows.
        """
        bucket = bucket_for(len(rows), self._buckets)
        if bucket is None or any(len(row.token_ids) != 1 for row in rows):
            return None
        # Rows of one request that go on with the state of each other are not computed beside each other.
        linked = bool(self._states) and _go_on([row.table(self._states[0].number) for row in rows])
        graph = self._graphs.get((bucket, linked))
        if graph is None:
            return None
        self._fill(rows, bucket, linked)
        if tokens is not None:
            self._buffer[: len(tokens)].copy_(tokens)
        graph.replay()
        return self._logits[: len(rows)]

    def _run(self, bucket: int, linked: bool) -> None:
        self._logits[:bucket].copy_(self._compute(self._inputs(bucket, linked)))

    def _inputs(self, bucket: int, linked: bool = False) -> DecodeInputs:
        parts = [self._buffer[start:] for start in self._starts[:-1]]
        token_ids, positions, context_lens, *others = [part[:bucket] for part in parts]
        count = len(self._attention)
        blocks = parts[len(parts) - count :][::-1]
        attention = tuple(
            DecodeBlocks(others[2 * i], DecodeTables(context_lens, others[2 * i + 1], blocks[i])) for i in range(count)
        )
        first, states = 3 + 2 * count, list[StateRuns]()
        for at in range(first, first + 4 * len(self._states), 4):
            sources, destinations, starts, kept = parts[at : at + 4]
            runs = starts if linked else self._runs
            of_rows = sources[:bucket], destinations[:bucket]
            states.append(
                StateRuns(runs[: bucket + 1], *of_rows, single=not linked, kept=kept[:bucket] if linked else None)
            )
        return DecodeInputs(token_ids, positions, attention, tuple(states))

    def _fill(self, rows: Sequence[StepRow], bucket: int, linked: bool = False) -> None:
        parts = padded_parts(rows, bucket, self._attention, self._states, linked=linked)
        host = packed(parts, self._starts, self._buffer.device)
        self._buffer[: len(host)].copy_(host, non_blocking=True)


def _go_on(tables: Sequence[Sequence[int]]) -> bool:
    """Returns whether a row begins with the state that the row before it writes."""
    return any(before[1] == after[0] for before, after in pairwise(tables))


def padded_parts(
    rows: Sequence[StepRow],
    bucket: int,
    attention: Sequence[GroupTables],
    states: Sequence[StateGroup],
    *,
    linked: bool = False,
) -> list[Numbers]:
    """Returns token ids, positions and context lengths; slots and starts of tables of each group of keys and values;
    sources and destinations of each group of states, and if rows are ``linked`` by their states the starts of runs and
    what is kept, which are empty otherwise; and the tables, those of the first group last.
    """
    padding = [0] * (bucket - len(rows))
    positions = np.zeros(bucket, np.int32)
    positions[: len(rows)] = [row.start for row in rows]
    context_lens = positions + 1
    context_lens[len(rows) :] = 0
    parts: list[Numbers] = [[row.token_ids[0] for row in rows] + padding, positions, context_lens]
    tables: list[Numbers] = []
    nowhere = [PADDING_SLOT] * len(padding)
    for group in attention:
        own, ids = group.parts(rows, positions)
        parts += own
        tables.append(ids)
    for kept in states:
        own_tables = [row.others[kept.number - 1] for row in rows]
        if linked:
            parts += run_numbers([1] * len(rows), own_tables, kept).padded(bucket)
            continue
        pairs = [kept.places(table) for table in own_tables]
        parts += [[source for source, _ in pairs] + nowhere, [written for _, written in pairs] + nowhere, [], []]
    return parts + tables[::-1]


_ROOM = 8
"""The tables of a layout have room for so many more blocks each."""
_REARRANGED = attrgetter("rearranged")


class GroupTables:
    """Lays out the tables of one group for decode steps, one behind the other.

    A step of the rows of the last one only adds the blocks that some of them have begun. All are laid out anew if there
    is no room, or a table was changed in another way, or does not count how often it was ``rearranged``.
    """

    def __init__(self, group: KvGroup) -> None:
        self._group = group
        self._tables: list[Sequence[int]] = []
        self._rearranged: list[int] | None = None
        """What the tables' ``rearranged`` was; None if not all tables have it."""
        self._begins = self._counts = self._ends = self._starts = np.empty(0, np.int32)
        """Each table is there from block ``begins`` to ``counts``, and has room up to ``ends``. Its block 0 would be at
        ``starts``."""
        self._ids = np.empty(0, np.int32)

    def parts(
        self, rows: Sequence[StepRow], positions: npt.NDArray[np.int32]
    ) -> tuple[list[Numbers], npt.NDArray[np.int32]]:
        """Returns slots and starts of the tables, for each of ``positions``, and the tables.

        A row's blocks are counted from the beginning of its context. None that a window leaves out is read.
        """
        size, number, own = self._group.layout.block_size, self._group.number, positions[: len(rows)]
        last_blocks, places = np.divmod(own, size)
        tables = [row.others[number - 1] for row in rows] if number else [row.block_table for row in rows]
        begins = self._group.begins(own)
        self._bring_up_to_date(tables, np.zeros_like(own) if begins is None else begins, last_blocks + 1)
        slots, starts = np.full(len(positions), PADDING_SLOT, np.int32), np.zeros(len(positions), np.int32)
        slots[: len(rows)] = self._ids[self._starts + last_blocks] * size + places
        starts[: len(rows)] = self._starts
        return [slots, starts], self._ids

    def _bring_up_to_date(
        self, tables: list[Sequence[int]], begins: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> None:
        """Has the ids of blocks ``begins`` to ``counts`` of each table."""
        if not self._fits(tables, begins, counts):
            self._lay_out(tables, begins, counts)
            return
        grown = np.flatnonzero(counts > self._counts)
        spans = zip(*(part[grown].tolist() for part in (self._starts, self._counts, counts)), strict=True)
        added = [
            (start + number, tables[row][number])
            for row, (start, known, count) in zip(grown.tolist(), spans, strict=True)
            for number in range(known, count)
        ]
        if added:
            places, ids = np.array(added).T
            self._ids[places] = ids - self._group.blocks.first
            np.maximum(self._counts, counts, out=self._counts)

    def _fits(self, tables: list[Sequence[int]], begins: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> bool:
        return (
            len(tables) == len(self._tables)
            and all(map(is_, tables, self._tables))
            and self._rearranged is not None
            and self._rearranged == list(map(_REARRANGED, tables))
            and bool((begins >= self._begins).all() and (counts <= self._ends).all())
        )

    def _lay_out(
        self, tables: list[Sequence[int]], begins: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> None:
        rearranged = [getattr(table, "rearranged", -1) for table in tables]
        self._tables, self._rearranged = tables, None if -1 in rearranged else rearranged
        self._begins, self._counts, self._ends = begins, counts, counts + _ROOM
        lengths = self._ends - begins
        self._starts = (lengths.cumsum() - lengths - begins).astype(np.int32)
        parts = 2 * len(tables) * [np.full(_ROOM, self._group.blocks.first, np.int32)]
        held = zip(tables, begins.tolist(), counts.tolist(), strict=True)
        parts[::2] = [block_ids(table, count, begin) for table, begin, count in held]
        self._ids = joined(parts) - self._group.blocks.first


SCORED_LOGITS = 2**23
"""About so many logits of tokens that are scored are in memory at a time: 32 MiB."""


class ModelRunner:
    """Owns the weights and the KV cache of one rank."""

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        dtype: Dtype,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        kernels: Kernels,
        device: torch.device = CPU,
        tp: TpGroup = ALONE,
        kv_memory: memoryview | None = None,
        block_kernels: BlockKernels | None = None,
        progress: Callable[[float], None] = lambda share: None,
        bounded: Sequence[int] = (),
        drafts: bool = False,
        kv_dtype: KvCacheDtype = KvCacheDtype.AUTO,
    ) -> None:
        """Loads this rank's part of the model. Raises ModelError if the folder does not hold it.

        ``drafts`` asks for the layer with which ``draft`` drafts tokens, too (``DecoderConfig.has_draft_layer``).

        The cache has ``num_blocks`` blocks of the group that keeps whole contexts, and ``bounded`` of each other group.
        ``kv_memory``, zeroed and of their bytes, is where to keep it. Without it, the cache is allocated on ``device``.
        With ``block_kernels``, weights stay in the blocks of their file, or become blocks (``FORMS``). ``progress`` is
        called with the share of the bytes that have been read, from 0 to 1.
        """
        torch_dtype = TORCH_DTYPES[dtype]
        self.cache = RankCache(config, dtype, block_size, (num_blocks, *bounded), tp, device, kv_memory, kv_dtype)
        self.layout, self.kv_cache = self.cache.layout, self.cache.whole
        self._scale, self._cap = config.attention_scale, config.attention_cap
        self._latent = config.latent if isinstance(config, FamilyConfig) else None
        self._shared = isinstance(config, FamilyConfig) and config.shared is not None
        self._blocks = config.blocks if isinstance(config, FamilyConfig) else None
        self._head_blocks = config.head_blocks if isinstance(config, FamilyConfig) else None
        self._max_model_len, self._hidden_size = max_model_len, config.hidden_size
        self._scored_rows = max(1, SCORED_LOGITS // config.vocab_size)
        self._kernels = kernels
        self._tp = tp
        self._graphs: DecodeGraphs | None = None
        unread = kernels if isinstance(kernels, CompiledKernels) else None
        quantisation = config.quantisation if isinstance(config, FamilyConfig) else None
        checkpoint = Checkpoint(folder, torch_dtype, device, progress, quantisation)
        building = Building(checkpoint, self._kernels, tp, block_kernels, unread)
        self._decoder = build_decoder(config, building, max_model_len, torch_dtype, drafts=drafts)
        self._drafting: Drafting | None = None
        if self._decoder.drafter is not None:
            plan = partial(self._planned_whole, self.cache.attention[0])
            self._drafting = Drafting(self._decoder.drafter, plan, block_size, max_model_len, tp)
        self._computed: ComputedRows | None = None
        """The last step, if tokens are drafted."""
        self._recorded_hidden: torch.Tensor | None = None
        """``[max_rows, hidden_size]``: the hidden states of the last recorded step, if tokens are drafted."""

    @torch.inference_mode()
    def run(
        self, rows: Sequence[StepRow], tokens: torch.Tensor | None = None, score: Score | None = None
    ) -> torch.Tensor:
        """Computes every row's tokens into the KV cache; single-token rows come first.

        ``tokens`` on the device of the cache take the place of those of the first rows, which have one each.
        ``score`` is given the logits after the rows' ``scored`` tokens, in their order and in pieces.

        Returns fp32 logits ``[number of rows with wants_logits, vocab_size]``, in the order of the rows, on the device
        of the cache and valid until the next call; on ranks other than 0 ``[that number, 0]``. Does not wait for a GPU
        to have computed them. Raises RankLost if another rank does not compute the same.
        """
        self._tp.begin_step()
        self._computed = None
        if self._graphs is not None and score is None:
            logits = self._graphs.run(rows, tokens)
            if logits is not None:
                if self._recorded_hidden is not None:
                    self._computed = ComputedRows(rows, self._recorded_hidden)
                wanting = [i for i, row in enumerate(rows) if row.wants_logits]
                return logits if len(wanting) == len(rows) else logits[self._places(wanting)]
        return self._run(rows, tokens, score)

    def _run(self, rows: Sequence[StepRow], tokens: torch.Tensor | None, score: Score | None) -> torch.Tensor:
        """Computes any step, and launches each kernel from here."""
        last, end = [], 0
        for row in rows:
            end += len(row.token_ids)
            if row.wants_logits:
                last.append(end - 1)
        token_ids, positions, wanted = to_device(
            [
                [token for row in rows for token in row.token_ids],
                [position for row in rows for position in range(row.start, row.context_len)],
                last,
            ],
            self.kv_cache.device,
        )
        if tokens is not None:
            token_ids[: len(tokens)].copy_(tokens)
        hidden = self._decoder.forward(token_ids, positions, self._planned(rows))
        if self._drafting is not None:
            self._computed = ComputedRows(rows, hidden)
        if score is not None:
            for places in self._scored_places(rows):
                score(self._decoder.logits(hidden[places]))
        return self._decoder.logits(hidden[wanted])

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow], count: int, choose: Choose = likeliest) -> list[list[int]]:
        """Drafts up to ``count`` tokens behind each row that wants some, and completes the cache of the others.

        The layer that drafts keeps a key and a value of each token whose next one is known. So ``rows`` are all of the
        last step of which a next token is known, in the order of the step, once, before the next step is computed. Rows
        of one request that share blocks see each other, as in a step. Drafts write the cache behind their row, in its
        blocks: what is there is written again when the tokens are known. So drafts end where the blocks end, or the
        longest context. Rank 0 has ``choose`` choose the drafts.

        Returns the drafts of each row that wants some, in the order of the rows; on all ranks the same. Waits for a
        GPU. Raises ValueError if no step was computed or the rows do not fit it, RankLost if another rank does not
        compute the same.
        """
        return self._drafted(rows, self._last_computed(), count, choose)

    @torch.inference_mode()
    def complete(
        self, rows: Sequence[DraftRow], tokens: torch.Tensor | None = None, of: ComputedRows | None = None
    ) -> None:
        """Does what ``draft`` does without drafts, for some rows of the last step, or of one that was ``kept``.

        ``tokens`` on the device, int64, take the place of the last next tokens of the first rows. Does not wait for a
        GPU. Raises ValueError and RankLost as ``draft`` does.
        """
        self._drafted(rows, self._last_computed() if of is None else of, tokens=tokens)

    def kept(self) -> ComputedRows:
        """Returns the last step for ``complete``: it can be completed when the next one was computed, too.

        Raises ValueError as ``draft`` does.
        """
        computed = self._last_computed()
        if computed.hidden is not self._recorded_hidden:
            return computed
        return ComputedRows(computed.rows, computed.hidden[: len(computed.rows)].clone())

    def _last_computed(self) -> ComputedRows:
        if self._computed is None:
            raise ValueError("there is no step whose tokens can be drafted on: a runner with drafts computes one first")
        return self._computed

    def _drafted(
        self,
        rows: Sequence[DraftRow],
        computed: ComputedRows,
        count: int = 0,
        choose: Choose = likeliest,
        tokens: torch.Tensor | None = None,
    ) -> list[list[int]]:
        if self._drafting is None:
            raise ValueError("a runner drafts no tokens that was not asked for the layer for it")
        starts = list(accumulate((len(step.token_ids) for step in computed.rows), initial=0))
        known = []
        for row in rows:
            step = computed.rows[row.row]
            if not 0 < len(row.next_tokens) <= len(step.token_ids):
                raise ValueError(f"{len(row.next_tokens)} next tokens for a row of {len(step.token_ids)}")
            table = step.block_table if row.block_table is None else row.block_table
            known.append(KnownTokens(step.start, starts[row.row], row.next_tokens, table, row.wanted))
        self._tp.begin_step()
        return self._drafting(computed.hidden, known, count, choose, tokens)

    def _planned(self, rows: Sequence[StepRow]) -> StepCache:
        """Returns the cache as these rows use it."""
        if self._shared:
            return self._planned_shared(rows)
        if self._head_blocks is not None:
            (group,) = self.cache.attention
            chosen = HeadBlockStep(self._kernels, group, _spans(group, rows), self._scale, self._head_blocks)
            return StepCache((), head_blocks=chosen)
        attention, latents, blocks = list[Attention](), list[LatentStep](), None
        for group in self.cache.attention:
            if self._blocks is not None:
                blocks = BlockStep(self._kernels, group, _spans(group, rows), self._scale, self._blocks)
                continue
            planned = self._planned_group(group, _spans(group, rows))
            if isinstance(planned, LatentStep):
                latents.append(planned)
            else:
                attention.append(planned)
        if not self.cache.states:
            return StepCache(attention, (), latents, blocks=blocks)
        lengths = [len(row.token_ids) for row in rows]
        states = []
        for kept in self.cache.states:
            runs = state_runs(lengths, [row.table(kept.number) for row in rows], kept, self.kv_cache.device)
            states.append(StepStates(kept.layers, runs))
        return StepCache(attention, states, latents, blocks=blocks)

    def _planned_shared(self, rows: Sequence[StepRow]) -> StepCache:
        """Returns the cache as these rows use it, for a model whose heads share one vector of a token."""
        groups, lengths = self.cache.attention, [len(row.token_ids) for row in rows]
        spans = [_spans(group, rows) for group in groups]
        runs = [run_numbers(lengths, [row.table(kept.number) for row in rows], kept) for kept in self.cache.states]
        device = self.kv_cache.device
        states = [
            StepStates(kept.layers, on_device(own, device)) for kept, own in zip(self.cache.states, runs, strict=True)
        ]
        return StepCache((), states, shared=SharedStep(self._kernels, groups, spans, runs, self._scale))

    def _planned_whole(self, group: KvGroup, rows: Sequence[AttentionRow]) -> StepCache:
        """Returns the cache with the group of whole contexts alone, which is ``group``, as these rows use it."""
        planned = self._planned_group(group, rows)
        return StepCache((), (), (planned,)) if isinstance(planned, LatentStep) else StepCache((planned,))

    def _planned_group(self, group: KvGroup, rows: Sequence[AttentionRow]) -> Attention | LatentStep:
        if self._latent is not None:
            return plan_latents(self._kernels, group, rows, group.heads, self._scale, self._latent)
        return self._kernels.plan_attention(group.layout, group.cache, rows, group.heads, self._scale, self._cap)

    def _scored_places(self, rows: Sequence[StepRow]) -> Iterator[torch.Tensor]:
        """Yields the places of scored tokens in the step, in pieces that are the same on every rank."""
        places, first = [], 0
        for row in rows:
            places += [first + place for place in row.scored]
            first += len(row.token_ids)
        for start in range(0, len(places), self._scored_rows):
            yield self._places(places[start : start + self._scored_rows])

    @torch.inference_mode()
    def capture_decode(
        self, kernels: GraphKernels, max_rows: int, make_graph: Callable[[], Graph], *, linked: bool = False
    ) -> None:
        """Captures decode steps, so that steps of up to ``max_rows`` single tokens are replayed from now on.

        ``linked`` captures those as well in which rows go on with each other's states, if the model keeps any. Stores
        nothing in the cache. Does nothing if the operations of the model's steps depend on their inputs.
        """
        if not self._decoder.capturable:
            return
        cache, kept = self.cache, None
        if self._drafting is not None:
            kept = torch.empty(max_rows, self._hidden_size, dtype=self.layout.dtype, device=self.kv_cache.device)
        self._recorded_hidden = kept

        def compute(inputs: DecodeInputs) -> torch.Tensor:
            attention, latents = list[Attention](), list[LatentStep]()
            for group, blocks in zip(cache.attention, inputs.attention, strict=True):
                where = (group.layout, group.cache, blocks.slots, blocks.tables)
                planned = (*where, group.heads, self._scale, self._max_model_len)
                form = None if self._latent is None else sparse_form(self._latent)
                if form is not None and form.most < self._max_model_len:
                    # Tokens whose context is short choose all of it.
                    latents.append(LatentStep(None, sparse=kernels.plan_sparse_decode(*planned, form)))
                elif self._latent is not None:
                    latents.append(LatentStep(kernels.plan_decode(*planned)))
                else:
                    attention.append(kernels.plan_decode(*planned, self._cap))
            states = [StepStates(kept.layers, runs) for kept, runs in zip(cache.states, inputs.states, strict=True)]
            hidden = self._decoder.forward(inputs.token_ids, inputs.positions, StepCache(attention, states, latents))
            if kept is not None:
                kept[: len(hidden)].copy_(hidden)
            return self._decoder.logits(hidden)

        self._graphs = DecodeGraphs(
            compute,
            make_graph,
            max_rows,
            self._max_model_len,
            cache.attention,
            cache.states,
            self.kv_cache.device,
            linked,
        )

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole blocks. All sources are read before any destination is written."""
        self.cache.copy_blocks(sources, destinations)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes these blocks: values that are not finite must not stay in memory that another request will own."""
        self.cache.clear(blocks)

    def _places(self, places: Sequence[int]) -> torch.Tensor:
        """Returns indices on the device. To index by a list would wait until the GPU has done all that is queued."""
        (moved,) = to_device([places], self.kv_cache.device)
        return moved.long()


def _spans(group: KvGroup, rows: Sequence[StepRow]) -> list[AttentionRow]:
    """Returns the rows as the attention of one group sees them."""
    if not group.number:
        return [AttentionRow(len(row.token_ids), row.context_len, row.block_table) for row in rows]
    return [
        AttentionRow(len(row.token_ids), row.context_len, *group.held(row.table(group.number), row.start))
        for row in rows
    ]
