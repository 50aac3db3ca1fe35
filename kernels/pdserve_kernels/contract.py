"""Says which kernels a model needs. Any set has them: plain torch, compiled C++, or Triton.

``reference`` says what each operation means; the sets in ``cpu`` and ``triton`` are tested against it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve_kernels.feed_forward import Activation, Routing
from pdserve_kernels.kv_layout import KvLayout


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One request's part of a step: the last ``new_tokens`` of ``context_len`` tokens, and the blocks of them all.

    Where layers have a window, ``first_block`` blocks at the beginning may be left out. Nothing is read before the
    first token that one of the new tokens sees.
    """

    new_tokens: int
    context_len: int
    blocks: Sequence[int]
    first_block: int = 0
    """The number, among the blocks of the context, of the first of ``blocks``."""


def widest_window(rows: Sequence[AttentionRow], block_size: int) -> int | None:
    """Returns the largest window with which no row sees a block that is left out; None if any window will do."""
    return min(
        (row.context_len - row.new_tokens + 1 - row.first_block * block_size for row in rows if row.first_block),
        default=None,
    )


def check_window(window: int | None, widest: int | None) -> None:
    """Raises IndexError if tokens with this window see blocks that are left out."""
    if widest is not None and (window is None or window > widest):
        raise IndexError(f"the blocks are those of a window of {widest}, and a layer sees {window or 'all'}")


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """The context of single-token rows, as int32 tensors on the device that holds the cache.

    Row ``i`` attends to ``context_lens[i]`` tokens, whose block ids are ``blocks[block_starts[i]:]``.
    """

    context_lens: torch.Tensor
    block_starts: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateRuns:
    """The runs of a step's tokens, for layers that keep a state: int32 tensors on the device of the states.

    Run ``i`` is the tokens ``starts[i]`` to ``starts[i + 1]`` of the step, which follow each other in one request. It
    begins with the state in block ``sources[i]``, or with zeros if that is -1, and leaves the state after its last
    token in block ``destinations[i]``, which no other run reads or writes; a run whose destination is -1 is padding: it
    stores nothing, and its output is 0. Source and destination may be the same block.
    """

    starts: torch.Tensor
    """``[runs + 1]``, from 0 to the number of tokens."""
    sources: torch.Tensor
    """``[runs]``"""
    destinations: torch.Tensor
    """``[runs]``"""
    single: bool
    """Whether every run has exactly one token."""
    kept: torch.Tensor | None = None
    """``[tokens]``: the block in which the state after a token of a run stays as well, or -1. None if none does.

    No run begins with such a block or ends there, no two tokens have the same, and a run's last token has none.
    """


def check_states(states: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless each block has an fp32 state of ``shape``, whose heads are contiguous."""
    if states.shape[1:] != shape or states.dtype is not torch.float32 or not states[0, 0].is_contiguous():
        raise ValueError(f"fp32 states of {shape} are wanted, and there are {states.dtype} {tuple(states.shape)}")


class BlockFormat(enum.IntEnum):
    """A number format of weights in blocks, by the number that GGUF files give it, or a higher one if they have none.

    A block is a few numbers of 4 to 8 bits and what they are multiplied by: ``elements`` values in ``block_bytes``.
    """

    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    MXFP4 = 39
    FP8 = 1000
    """An fp32 scale for 128 numbers in e4m3, of which none is NaN. A GPU that multiplies FP8 rounds rows to it, too."""
    FP8_SHORT = 1001
    """As ``FP8``, with a scale for 32 numbers, which are multiplied by rows as they are."""
    NVFP4 = 1002
    """An fp32 factor, which all blocks of a row have alike, two scales in e4m3, and 32 numbers in e2m1."""
    Q8_OFFSET = 1003
    """An fp32 scale, an fp32 offset, and 32 bytes."""

    @property
    def elements(self) -> int:
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]

    @property
    def read_bytes(self) -> int:
        """The bytes of a block, but for what all blocks of a row have alike."""
        return self.block_bytes - 4 if self is BlockFormat.NVFP4 else self.block_bytes


BLOCK_FORMATS = frozenset(kind for kind in BlockFormat if kind < BlockFormat.FP8)
"""The formats that GGUF files have. Others are made when a folder is read, for a GPU alone."""

_BLOCKS = {
    BlockFormat.Q4_0: (32, 18),
    BlockFormat.Q4_1: (32, 20),
    BlockFormat.Q5_0: (32, 22),
    BlockFormat.Q5_1: (32, 24),
    BlockFormat.Q8_0: (32, 34),
    BlockFormat.Q4_K: (256, 144),
    BlockFormat.Q5_K: (256, 176),
    BlockFormat.Q6_K: (256, 210),
    BlockFormat.IQ4_NL: (32, 18),
    BlockFormat.IQ4_XS: (256, 136),
    BlockFormat.MXFP4: (32, 17),
    BlockFormat.FP8: (128, 132),
    BlockFormat.FP8_SHORT: (32, 36),
    BlockFormat.NVFP4: (32, 22),
    BlockFormat.Q8_OFFSET: (32, 40),
}
"""The elements and the bytes of a block."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight ``[out, in]`` as a file has it: bytes ``[out, bytes of a row's blocks]``."""

    format: BlockFormat
    blocks: torch.Tensor
    key: str = ""
    """Says which part of which tensors of the model this is; empty if nobody will ask for the same weight again."""
    dtype: torch.dtype = torch.bfloat16
    """The numbers of the rows that it is multiplied with, and of its own rows where they are looked up."""

    @property
    def inputs(self) -> int:
        return self.blocks.shape[1] // self.format.block_bytes * self.format.elements


@dataclass(frozen=True, slots=True)
class UnreadWeight:
    """A weight ``[out, in]`` that is read from its file when it is needed, which it is not if its packed form is there.

    ``key`` is that of ``BlockWeight``.
    """

    key: str
    shape: tuple[int, int]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    parts: tuple[UnreadWeight, ...] = ()
    """Those whose outputs it has one behind the other, if it is several tensors."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one expert, each in the form in which it is multiplied."""

    inner: tuple[UnreadWeight | BlockWeight, ...]
    """Gates and then ups, ``[2 * channels, hidden]``, as one weight or two; or ups alone, ``[channels, hidden]``."""
    down: UnreadWeight | BlockWeight
    """``[hidden, channels]``"""
    inner_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """What the experts of a layer have in common, and how rows are sent to them."""

    count: int
    hidden: int
    channels: int
    """Those of each expert on this rank."""
    dtype: torch.dtype
    """The numbers of the rows, and of weights that are not in blocks."""
    routing: Routing
    activation: Activation
    gated: bool
    """Whether an expert has gates."""
    weighs_inputs: bool = False
    """Whether what goes into an expert is multiplied by its weight, and not what comes out."""
    correction: torch.Tensor | None = None
    """fp32 ``[count]``: what is added to the scores by which experts are chosen."""
    factors: torch.Tensor | None = None
    """``[count]``: what the weights of experts are multiplied by in the end."""
    some: range | None = None
    """The experts of this rank, where other ranks have the others; None for all."""
    identities: int = 0
    """The last of ``count`` that give what they are given, and have no weights; 0 if another rank adds what they give.

    They are not among ``some``.
    """

    @property
    def own(self) -> range:
        """The experts whose weights there are. A row gets nothing from the others."""
        return range(self.count) if self.some is None else self.some


class Experts(Protocol):
    """The experts of one layer, of which each row is sent to a few."""

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        """Computes ``reference.experts``: the weighted sum of the experts that a router's ``logits`` choose.

        ``x`` is ``[rows, hidden]``, ``logits`` ``[rows, count]``, of its numbers or fp32. ``beside``, of the shape of
        ``x``, is added to the sum. Returns the shape of ``x``. A row with a logit that is NaN has a result of NaN.
        """


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, in]`` to ``[tokens, out]``."""


class HeadLinear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, heads, in]`` to ``[tokens, heads, out]``."""

    def of_one(self, x: torch.Tensor, heads: slice) -> torch.Tensor:
        """Maps ``[tokens, in]``, which these heads share, to ``[tokens, len(heads), out]``."""


class BlockLinear(Linear, Protocol):
    """The product with a weight that stays in blocks, or packed, with rows of ``BlockWeight.dtype``."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the weight's rows of these numbers, ``[len(ids), in]``: an embedding is looked up in this way."""


class UnreadKernels(Protocol):
    """Kernels that may have the packed form of a weight without reading it."""

    def unread_linear(self, weight: UnreadWeight, bias: torch.Tensor | None = None) -> Linear:
        """Returns the product with a weight."""

    def unread_table(self, weight: UnreadWeight) -> torch.Tensor:
        """Returns the weight itself, for looking rows up."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The normalisation of each query head and each key head, with weights ``[head_dim]``."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Attention(Protocol):
    """The attention of one step. It is planned once, and called once for each layer."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key_value: torch.Tensor | None,
        window: int | None = None,
        *,
        chunked: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the new keys and values, then attends causally to each row's context.

        ``query`` is ``[tokens, heads, head_dim]``, and ``key_value`` is ``[2, tokens, kv_heads, head_dim]``, or
        ``[1, ...]`` if keys have the values in them, or None if the keys and values of this layer are stored already.
        The result is ``[tokens, heads, value_dim]``. With a ``window``,
        a token sees itself and the ``window - 1`` tokens before it; if it is ``chunked``, contexts are cut every
        ``window`` tokens, and a token sees no token before the last cut. ``sinks``, fp32 ``[heads]``, are scores of
        one more key for each query head, which has no value: it takes a part of the weights.
        """

    def from_projection(
        self,
        layer: int,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None = None,
        window: int | None = None,
        *,
        chunked: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes ``reference.projected`` of a projection's output, and then the attention.

        ``qkv`` is ``[tokens, heads + 2 * kv_heads, head_dim]``. Returns ``[tokens, heads, head_dim]``.
        """


@dataclass(frozen=True, slots=True)
class SparseForm:
    """Which tokens of its context a token attends to: the ``count`` whose index keys have the highest scores.

    The channels of a key from ``first`` on are its index key, to which queries are not compared. Of tokens with equal
    scores, earlier ones are chosen. A score that is NaN is as high as any.

    With a ``pool``, of which ``count`` is a multiple, so many tokens that follow each other are chosen together, by the
    first channels of the last one's index key. A token also attends to those of its context behind the last pool.
    """

    count: int
    first: int
    pool: int = 1

    @property
    def most(self) -> int:
        """The most tokens that a token attends to. One whose context is no longer attends to all of it."""
        return self.count + self.pool - 1


def check_choosing(layout: KvLayout, form: SparseForm) -> None:
    """Raises ValueError if no tokens can be chosen in such a cache."""
    if form.pool > 1 and (layout.fp8 or form.count % form.pool):
        raise ValueError(f"pools of {form.pool} tokens are chosen of {form.count} in numbers of the model, not in FP8")
    if not layout.shared_channels or layout.kv_heads != 1:
        raise ValueError(f"tokens are chosen where keys have the values in them, not in {layout}")


SCORES_AT_ONCE = 2**26
"""So many scores of index keys are on a GPU at a time (256 MiB), or those of one token."""


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """What the tokens of a step score index keys by. A score is the sum of ``weight * max(0, query . key)`` of heads.

    ``query`` is ``[tokens, heads, channels]`` of the cache's numbers, and ``weights`` fp32 ``[tokens, heads]``.
    """

    query: torch.Tensor
    weights: torch.Tensor

    def of(self, tokens: torch.Tensor) -> IndexQueries:
        """Returns those of some tokens."""
        return IndexQueries(self.query[tokens], self.weights[tokens])


class SparseAttention(Protocol):
    """The attention of one step to chosen tokens. It is planned once, and called once for each layer, in their order.

    A token's result does not depend on the other tokens of the step, as far as that of ``Attention`` does not.
    """

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        index: IndexQueries | None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the new keys, then attends to those of each token's context that ``index`` chooses.

        Without ``index``, these are the tokens that the last layer with one has chosen. ``query`` is ``[tokens, heads,
        first]``, and ``key`` is ``[1, tokens, 1, head_dim]`` with the values and the index keys in it. The result is
        ``[tokens, heads, value_dim]``. ``sinks`` are those of ``Attention``.
        """


class Kernels(Protocol):
    """One implementation of every operation. Shapes are those of ``reference``."""

    @property
    def name(self) -> str:
        """The name of the set. Where two names differ, the same tokens may be rounded differently."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Returns the product with a weight ``[out, in]``, which never changes and may be kept in another order."""

    def head_linear(self, weight: torch.Tensor) -> HeadLinear:
        """Returns the product of each head with its own of the weights ``[heads, out, in]``, which never change."""

    def experts(self, form: ExpertsForm, weights: Iterable[ExpertWeights]) -> Experts:
        """Returns the operation with these experts, which are ``form.count``, in the order of their numbers.

        Weights come in blocks only to a set that has ``BlockKernels``.
        """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...

    def activated(self, inner: torch.Tensor, activation: Activation, *, gated: bool) -> torch.Tensor: ...

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        runs: StateRuns,
        *,
        silu: bool,
    ) -> torch.Tensor:
        """Computes ``reference.causal_conv``, and writes each run's next state."""

    def gated_delta_rule(
        self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, runs: StateRuns
    ) -> torch.Tensor:
        """Computes ``reference.gated_delta_rule``, and writes each run's next state."""

    def mamba2_scan(
        self,
        xbc: torch.Tensor,
        steps: torch.Tensor,
        rate: torch.Tensor,
        skip: torch.Tensor,
        state: torch.Tensor,
        runs: StateRuns,
    ) -> torch.Tensor:
        """Computes ``reference.mamba2_scan``, and writes each run's next state."""

    def mamba_scan(
        self,
        x: torch.Tensor,
        steps: torch.Tensor,
        write: torch.Tensor,
        read: torch.Tensor,
        rate: torch.Tensor,
        skip: torch.Tensor,
        state: torch.Tensor,
        runs: StateRuns,
    ) -> torch.Tensor:
        """Computes ``reference.mamba_scan``, and writes each run's next state."""

    def plan_attention(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        cap: float | None = None,
    ) -> Attention:
        """Plans a step. Rows with one new token come before rows with several.

        ``scale`` multiplies the scores. With a ``cap``, above 0, a score ``x`` then becomes ``cap * tanh(x / cap)``.
        """

    def plan_sparse(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        form: SparseForm,
    ) -> SparseAttention:
        """Plans a step of attention to chosen tokens, in a cache whose keys have the values in them.

        Rows may come in any order. Each has the blocks of its whole context.
        """


class BlockKernels(Protocol):
    """Multiplies from weights in blocks, or packed, so that hardly more bytes are read than the file has."""

    @property
    def on_gpu(self) -> bool:
        """Whether it multiplies all formats, and not only those of GGUF files."""

    def block_linear(self, weight: BlockWeight, bias: torch.Tensor | None = None) -> BlockLinear: ...


class GraphKernels(Kernels, Protocol):
    """A set whose decode step may be captured once and replayed with other numbers in the same tensors."""

    def plan_decode(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        slots: torch.Tensor,
        tables: DecodeTables,
        heads: int,
        scale: float,
        max_context: int,
        cap: float | None = None,
    ) -> Attention:
        """Plans ``len(slots)`` single-token rows. The plan does not depend on the numbers in ``slots`` and ``tables``.

        ``slots`` has the int32 ``block * block_size + offset`` of each new token. No context exceeds ``max_context``. A
        row of padding has slot -1 and no context: it stores nothing, reads nothing, and its attention is 0.
        """

    def plan_sparse_decode(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        slots: torch.Tensor,
        tables: DecodeTables,
        heads: int,
        scale: float,
        max_context: int,
        form: SparseForm,
    ) -> SparseAttention:
        """Plans single-token rows as ``plan_decode`` does, for attention to chosen tokens."""
