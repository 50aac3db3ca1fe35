"""Says what a model is made of: parts, their sizes, and the names of their tensors.

A family reads its configuration and returns a ``ModelRecipe``; ``decoder.RecipeDecoder`` builds and runs what the
recipe says. So a family without a new part has no code of its own that computes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve_kernels.feed_forward import Activation, GroupScore, Routing, Scoring


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency is divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Low frequencies are divided by ``factor``, high ones stay, and those between are mixed (Peng et al., 2023)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by ``factor``, high ones stay, and those between are smoothed, as in Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Each frequency is divided by a number of its own: one list of them for contexts beyond the original ones."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class PartialScaling:
    """The first ``part`` of a whole head's frequencies stay, divided by ``factor``, and the others are 0."""

    part: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Rotary:
    """The frequencies with which positions turn queries and keys."""

    theta: float
    scaling: LinearScaling | YarnScaling | Llama3Scaling | LongScaling | PartialScaling | None = None
    divisors: tuple[float, ...] = ()
    """The divisor of each frequency; empty if none is divided."""
    width: int | None = None
    """The channels of a head, from the first on, that are turned; None for all of them."""
    interleaved: bool = False
    """Whether neighbouring channels are turned against each other, and not the halves."""
    backwards: bool = False
    """Whether they are turned the other way."""
    learned: str = ""
    """The tensor, by its whole name, of the logarithms of what frequencies are multiplied by, if there is one."""


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries, once rotated, are multiplied by ``1 + beta * log(1 + (position + first) // step)``."""

    beta: float
    step: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class HeadScales:
    """The queries of each head are multiplied by ``scale * log(position + 1) + bias``.

    Both are a number of each head, in tensors of these whole names, within the layer.
    """

    scale: str
    bias: str


class NormKind(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the last dimension."""

    eps: float
    kind: NormKind = NormKind.RMS
    offset: float = 0.0
    """What is added to the weights of the checkpoint."""
    weighted: bool = True
    biased: bool = False
    gate_rank: int = 0
    """The numbers that a gate of the output is made of, by two products with silu between; 0 without a gate.

    The names of all its tensors then begin with the norm's, and its own weights are ``.norm``.
    """


class Fusion(enum.Enum):
    """How one tensor holds the queries, keys and values of all heads, from its first output on."""

    PARTS = "parts"
    """All query heads, then all key heads, then all value heads."""
    GROUPS = "groups"
    """Each key head stands behind its query heads and before its value head."""


class NormScope(enum.Enum):
    """What of the queries, and of the keys, is normalised together."""

    HEAD = "head"
    """Each head, all with the same weights."""
    EACH_HEAD = "each_head"
    """Each head, with weights of its own."""
    ALL = "all"
    """All heads together."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The normalisation of queries and keys."""

    norm: Norm
    query: str
    key: str
    scope: NormScope = NormScope.HEAD
    after_rotary: bool = False


@dataclass(frozen=True, slots=True)
class IndexRecipe:
    """What chooses the tokens that a token attends to: those of its context whose index keys score highest.

    A token has one index key, which is kept behind its latent, and ``heads`` queries, which come from the vector that
    those of the attention come from (DeepSeek-V3.2, 2025). Names are those of tensors, within the layer.
    """

    count: int
    """The most tokens that a token attends to."""
    heads: int
    channels: int
    """The channels of a key, and of each head's query. The first of them are turned, as many as the attention's."""
    interleaved: bool
    """Whether neighbouring channels are turned against each other, and not the halves."""
    turns_last: bool = False
    """Whether the last channels are turned, and not the first."""
    pool: int = 1
    """So many tokens that follow each other are chosen together, by one key, if it is more than 1.

    It is the sum of their keys, weighed for each channel by a softmax of their gates, to which ``pool_bias`` is added.
    A token also attends to those of its context that are in no whole pool. ``count`` is a multiple of it.
    """
    shared: bool = False
    """Whether the layer takes what the layer before it has chosen, and has no tensors of its own."""
    norm: Norm = Norm(1e-6, NormKind.LAYER, biased=True)
    """The norm of keys."""
    query: str = "self_attn.indexer.wq_b"
    key: str = "self_attn.indexer.wk"
    key_norm: str = "self_attn.indexer.k_norm"
    weights: str = "self_attn.indexer.weights_proj"
    """Leads from the layer's input to the weight of each head. It is computed in fp32."""
    query_norm: str = ""
    """The norm of the layer's input that queries come from, of the kind of ``norm``, if they come from that."""
    head_scales: HeadScales | None = None
    """What queries are multiplied by."""
    pool_gate: str = "self_attn.indexer.index_kpool_compress_gate"
    """The tensor, by its whole name, that leads from the layer's input to a token's gates."""
    pool_bias: str = "self_attn.indexer.index_kpool_compress_ape"
    """The tensor, by its whole name, with the bias of each gate by the place of a token in its pool."""

    @property
    def kept(self) -> int:
        """The channels that are kept of a token: its key, and its gates until its pool is whole."""
        return self.channels * (1 if self.pool == 1 else 2)


@dataclass(frozen=True, slots=True)
class LatentRecipe:
    """Keys and values that come from one short vector of a token, which all heads share, and which alone is kept.

    The projection ``key`` of the attention leads to a token's latent and to the part of its key that is turned;
    ``value`` leads from a latent to each head's part of the key that is not turned, and its value.
    """

    rank: int
    """The channels of a latent."""
    plain: int
    """The channels of a head's key that do not know positions."""
    turned: int
    """Those that do, which heads share."""
    value: int
    """The channels of a head's value."""
    norm: Norm
    """The norm of latents, those of queries included."""
    query_rank: int = 0
    """The channels of the vector that queries come from; 0 if they come from the layer's input."""
    query_pair: bool = False
    """Whether queries come from that vector twice: as its norm gives it, and beside that as it is."""
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    key_norm: str = "self_attn.kv_a_layernorm"
    key_up: str = ""
    """The tensor that leads from each head's part of the key that is not turned to a latent, if ``value`` is in two."""
    value_up: str = ""
    """The other one, which leads from a latent to each head's value."""
    query_scale: float = 1.0
    """What queries are multiplied by."""
    scale: float = 1.0
    """What latents are multiplied by once they are normalised."""
    head_scales: HeadScales | None = None
    """What queries are multiplied by, too."""
    still: int = 0
    """The channels of zeros behind a latent, as many as layers turn whose cache it shares, if it turns none."""
    key_from: int | None = None
    """The layer before this one whose latents this one has, too. It keeps them once more, with its own index keys."""
    index: IndexRecipe | None = None
    """What chooses the tokens that a token attends to; None if it attends to all before it."""

    @property
    def channels(self) -> int:
        """The channels of a token's key."""
        return self.rank + self.turned + self.still

    @property
    def kept(self) -> int:
        """The channels that are kept of a token: its key and its index key."""
        return self.channels + (0 if self.index is None else self.index.kept)


@dataclass(frozen=True, slots=True)
class EntriesRecipe:
    """Entries, each of which stands for ``every`` tokens (DeepSeek-V4, 2026). Names are within the layer.

    A token has a vector and a gate for each channel. Entry ``i`` is the sum of the vectors of tokens ``i * every`` to
    ``(i + 1) * every - 1``, weighed by a softmax of their gates over these tokens, and normalised. If entries overlap,
    it has the tokens of entry ``i - 1`` as well, with further vectors and gates, which stand before those for their
    own entry. Tokens see an entry from its last token on.
    """

    every: int
    channels: int
    overlapping: bool = False
    value: str = "attn.compressor.wkv"
    gate: str = "attn.compressor.wgate"
    bias: str = "attn.compressor.ape"
    """The tensor, by its whole name, that is added to gates, by the place of a token among those of its entry."""
    norm: str = "attn.compressor.norm"

    @property
    def parts(self) -> int:
        """The entries that a token has a part in."""
        return 2 if self.overlapping else 1


@dataclass(frozen=True, slots=True)
class EntryIndexRecipe:
    """What chooses the entries that a token attends to: those whose index entries score highest."""

    count: int
    """The most entries that a token attends to."""
    heads: int
    entries: EntriesRecipe
    query: str = "attn.indexer.wq_b"
    weights: str = "attn.indexer.weights_proj"
    """Leads from the layer's input to the weight of each head. It is computed in fp32."""


@dataclass(frozen=True, slots=True)
class SharedKvRecipe:
    """One vector of a token that is the key and the value of all heads, and entries of further tokens beside it.

    The projection ``key`` of the attention leads to it, and ``query`` from a shorter vector to all heads' queries,
    which are normalised without weights. The last channels of a head are turned, and of its result turned back. Heads
    of one group have a first product together, whose results ``out`` takes.
    """

    query_rank: int
    """The channels of the vector that queries come from."""
    turned: int
    """The channels of a head that are turned. Neighbouring ones are turned against each other."""
    groups: int
    group_rank: int
    """The numbers that the results of one group of heads become."""
    norm: Norm
    """The norm of queries, keys and entries."""
    entries: EntriesRecipe | None = None
    """What a token attends to beside the tokens of its window; None if that is nothing."""
    index: EntryIndexRecipe | None = None
    """What chooses entries; None if a token attends to all before it."""
    query_down: str = "attn.wq_a"
    query_norm: str = "attn.q_norm"
    key_norm: str = "attn.norm"
    group_out: str = "attn.wo_a"

    @property
    def kept(self) -> int:
        """The channels that are kept of an entry: its own, and those of its index entry."""
        own = 0 if self.entries is None else self.entries.channels
        return own + (0 if self.index is None else self.index.entries.channels)

    @property
    def numbers(self) -> int:
        """The fp32 numbers of a layer's state: of each channel of entries that are not complete, two."""
        return 0 if self.entries is None else 2 * self.entries.parts * self.kept


@dataclass(frozen=True, slots=True)
class BlockIndexRecipe:
    """What chooses the tokens that a token attends to, by blocks of ``every`` tokens (Qwen 4, 2026).

    A token has an index key, and those of a block become one by their mean, a norm, and a rotation by the position of
    the block's first token. A token attends to the blocks whose keys score highest, of those that end with it or before
    it, and to all tokens behind the last one of these. Names are those of tensors, within the layer.
    """

    count: int
    """The most blocks that a token attends to."""
    every: int
    heads: int
    channels: int
    """The channels of a key, and of each head's query. The first of them are turned, as many as the attention's."""
    norm: Norm
    """The norm of queries and of keys of blocks."""
    projection: str = "self_attn.indexer.index_qk_proj"
    """Leads from the layer's input to the queries of all heads, and then to the key of a token."""
    query_norm: str = "self_attn.indexer.q_layernorm"
    key_norm: str = "self_attn.indexer.k_layernorm"

    @property
    def numbers(self) -> int:
        """The fp32 numbers of a layer's state: the keys of tokens whose block is not complete."""
        return (self.every - 1) * self.channels

    @property
    def whole(self) -> int:
        """The longest context of which a token attends to all."""
        return (self.count + 1) * self.every - 1


@dataclass(frozen=True, slots=True)
class HeadBlockIndex:
    """What chooses the blocks of a context that a token attends to (MiniMax M3, 2026). Names are within the layer.

    A token has one index key, and a query for each KV head, whose query heads attend to what it chooses: the blocks
    with the index keys that score highest. Both are normalised, and turned as heads are, from their first channel on.
    """

    size: int
    """The tokens of a block. The first one begins with the context."""
    count: int
    """The most blocks that a token attends to."""
    local: int
    """So many of them are the last ones, with the block of the token itself; at least 1."""
    channels: int
    norm: Norm
    query: str = "self_attn.index_q_proj"
    key: str = "self_attn.index_k_proj"
    query_norm: str = "self_attn.index_q_norm"
    key_norm: str = "self_attn.index_k_norm"

    @property
    def tokens(self) -> int:
        """The most tokens that a token attends to."""
        return self.size * self.count


@dataclass(frozen=True, slots=True)
class HeadBlocksRecipe:
    """Heads of a model some of whose layers attend to chosen blocks.

    The cache has more channels of a head: one half of the token's index key stands behind each KV head's key, and the
    other one behind its value. So heads are split, sent and kept as any others. Layers that attend to whole contexts
    have zeros there.
    """

    head_dim: int
    """The channels of a head, without those behind it."""
    beside: int
    """Those behind it."""
    index: HeadBlockIndex | None
    """None for a layer that attends to whole contexts."""


@dataclass(frozen=True, slots=True)
class GateRecipe:
    """Gates of heads: each head's output is multiplied by what ``activation`` makes of its gate."""

    name: str = ""
    """The projection to the gates of all heads; empty if ``query`` has each of them behind its head's query."""
    one: bool = False
    """Whether a gate is one number for a head, and not one for each of its channels."""
    activation: Activation = Activation.SIGMOID


@dataclass(frozen=True, slots=True)
class AttentionRecipe:
    """One layer's attention. Names are those of tensors, within the layer and without ``.weight`` or ``.bias``."""

    rotary: Rotary | None
    """None for a layer that does not know positions."""
    query_scale: QueryScale | None = None
    window: int | None = None
    """The number of tokens that the layer sees, including the newest; None for all."""
    chunked: bool = False
    """Whether contexts are cut every ``window`` tokens, and a token sees none before the last cut."""
    head_dim: int | None = None
    """The channels of a head, if they are not those of the model."""
    heads: int | None = None
    """The number of query heads, if it is not that of the model. Layers of one cache group have the same."""
    kv_heads: int | None = None
    """The number of KV heads, if it is not that of the model."""
    kv_from: int | None = None
    """The layer before this one whose keys and values this one attends to, so that it has no cache of its own."""
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    """Empty if values are the keys, as they are before their norm and their rotation."""
    out: str = "self_attn.o_proj"
    fused: str = ""
    """The tensor that holds ``query``, ``key`` and ``value``, if there is one."""
    fusion: Fusion = Fusion.PARTS
    biased: frozenset[str] = frozenset()
    """Those of the names above that have a bias."""
    sinks: str = ""
    """The tensor, by its whole name, with a score for each query head that has no value, if there is one."""
    norms: HeadNorm | None = None
    value_norm: Norm | None = None
    """The normalisation of each value head, without weights."""
    transposed: bool = False
    """Whether the checkpoint has the weights as ``[in, out]``."""
    latent: LatentRecipe | None = None
    """How keys and values come from latents, if they do."""
    shared: SharedKvRecipe | None = None
    """How all heads have one vector of a token as key and value, if they do."""
    blocks: BlockIndexRecipe | None = None
    """What chooses the tokens that a token attends to; None if it attends to all before it."""
    head_blocks: HeadBlocksRecipe | None = None
    """How heads have index keys behind them, if layers of the model attend to chosen blocks."""
    gate: GateRecipe | None = None
    """What each head's output is multiplied by, if it is gated."""
    value_dim: int | None = None
    """The channels of a value, if a head's key has more. The cache has as many of both: the others are 0."""
    value_scale: float = 1.0
    """What such values are multiplied by."""

    @property
    def norms_apart(self) -> bool:
        """Whether queries and keys are normalised by steps of their own, which no kernel has in one with attention.

        The same steps have values that are normalised, or that are the keys, and queries alone.
        """
        if self.value_norm is not None or not self.value or self.kv_from is not None:
            return True
        norms = self.norms
        if norms is None:
            return False
        fits = norms.norm.kind is NormKind.RMS and norms.scope is NormScope.HEAD and not norms.after_rotary
        # The kernel normalises what it is given, so a scale would be lost in it.
        return not fits or self.query_scale is not None


@dataclass(frozen=True, slots=True)
class MlpRecipe:
    """A feed-forward part: ``down(activation(gate(x)) * up(x))``, or without a gate ``down(activation(up(x)))``."""

    channels: int
    activation: Activation = Activation.SILU
    gate: str = "mlp.gate_proj"
    """Empty if there is no gate."""
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    fused: str = ""
    """The tensor that holds ``gate`` and then ``up``, if there is one."""
    interleaved: bool = False
    """Whether each channel's gate stands before its up in that tensor, and not all gates before all ups."""
    biased: frozenset[str] = frozenset()
    """Those of the names above that have a bias."""
    transposed: bool = False
    """Whether the checkpoint has the weights as ``[in, out]``."""
    gate_scale: float = 1.0
    """What gates are multiplied by before the activation."""
    sparsity: float = 0.0
    """The share of gates that become 0, if gates are normally distributed; others lose the bound that they are above.

    The bound follows from the mean and the deviation of a token's gates.
    """

    @property
    def gated(self) -> bool:
        return bool(self.gate or self.fused)


@dataclass(frozen=True, slots=True)
class ExpertsRecipe:
    """A feed-forward part of many experts, of which each token is sent to a few."""

    count: int
    chosen: int
    expert: MlpRecipe
    """One expert. Its names have ``{}`` where the number of the expert stands."""
    router: str = "mlp.gate"
    router_biased: bool = False
    scoring: Scoring = Scoring.SOFTMAX
    normalised: bool = False
    """Whether the weights of the chosen experts are scaled to a sum of one."""
    correction: str = ""
    """The tensor, by its whole name, that is added to the scores by which experts are chosen, not to their weights."""
    correction_optional: bool = False
    """Whether files may leave it out."""
    correction_shape: tuple[int, ...] = ()
    """The shape of this tensor, if it is not that of the scores of one token."""
    precise_router: bool = False
    """Whether the router computes in fp32 whatever the numbers of the model."""
    groups: int = 1
    chosen_groups: int = 1
    """Experts are chosen from so many of ``groups`` equal groups: those with the highest ``group_score``."""
    group_score: GroupScore = GroupScore.TWO_BEST
    scale: float = 1.0
    """What the weights are multiplied by."""
    weighs_inputs: bool = False
    """Whether what goes into an expert is multiplied by its weight, and not what comes out."""
    by_token: str = ""
    """The tensor, by its whole name, with the experts of each token id, if the router only weighs them."""
    factors: str = ""
    """The tensor, by its whole name, of a number for each expert by which its weights are multiplied."""
    smallest_sum: float = 0.0
    """What is added to the sum by which weights are divided."""
    identities: int = 0
    """So many of the ``count`` experts, the last ones, have no tensors and give what they are given.

    Files may have some tensors under their numbers, which nothing uses.
    """
    shared: MlpRecipe | None = None
    """One more expert, to which each token is sent."""
    shared_gate: str = ""
    """The product whose sigmoid weighs the shared expert, if there is one."""
    stacked: tuple[tuple[str, str], ...] = ()
    """The tensors, by their whole names, that hold one of all experts' in each part of their first dimension.

    Beside each stands the whole name of that of one expert, with ``{}`` for its number.
    """
    apart: MlpRecipe | None = None
    """One expert in files that have no tensors of all experts, if there are such files."""
    turned_by_shape: bool = False
    """Whether a transposed expert may be stored as ``[out, in]`` too, which the shape of its fused tensor says."""

    @property
    def routing(self) -> Routing:
        """The rule by which experts are chosen and weighed."""
        return Routing(
            self.chosen,
            self.scoring,
            self.normalised,
            self.smallest_sum,
            self.scale,
            self.groups,
            self.chosen_groups,
            self.group_score,
        )


@dataclass(frozen=True, slots=True)
class MlpBesideExperts:
    """A feed-forward part and experts, which are given the residual as it is and whose results are added."""

    mlp: MlpRecipe
    experts: ExpertsRecipe
    before_mlp: str
    """The norms before and behind each, of the kind of the layer's."""
    after_mlp: str
    before_experts: str
    after_experts: str
    router_weights: str
    """The tensor, by its whole name, with the weights of the norm before the router."""
    router_scale: float
    """What these weights are multiplied by."""


FeedForwardRecipe = MlpRecipe | ExpertsRecipe | MlpBesideExperts


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """What a layer adds to the residual at its end: ``norm(up(activation(down(residual)) * its input))``."""

    activation: Activation
    down: str = "per_layer_input_gate"
    up: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"


class MixerRecipe(Protocol):
    """A part that mixes tokens by a state of fixed size, in place of attention or beside it: a hashable dataclass.

    ``parts.mixers`` has the part of each kind.
    """

    @property
    def heads(self) -> int:
        """The units by which ranks split the state, each of ``numbers`` fp32 numbers; 0 if each rank has the whole."""

    @property
    def numbers(self) -> int:
        """The fp32 numbers of the state of one unit, or of the whole state if ``heads`` is 0."""

    @property
    def token_numbers(self) -> int:
        """The most numbers of the model's kind that the part has of one token at once, on all ranks together."""


@dataclass(frozen=True, slots=True)
class DeltaNetRecipe:
    """A gated delta net. A key head has a query, a key and ``group`` value heads; ranks split key heads."""

    heads: int
    group: int
    key_dim: int
    value_dim: int
    width: int
    """The tokens that the convolution sees."""
    norm: Norm
    """The norm of each value head, whose output is multiplied by what ``gate`` makes of its gate."""
    gate: Activation = Activation.SILU
    inner: tuple[str, ...] = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")
    """The projections to queries, keys, values and gates, and to betas and steps, both by key head.

    Or one to queries, keys, values, gates, betas and steps, one after the other; four, of which the first leads to
    queries, keys and values; or six.
    """
    tiled: bool = False
    """Whether ``out`` takes the first value head of every key head first, then the second of every one, and so on."""
    conv: str = "linear_attn.conv1d"
    convs: tuple[str, ...] = ()
    """The tensors that hold ``conv`` one after the other, if these are several, wherever it is cut."""
    beta_scale: float = 1.0
    """What betas are multiplied by. With 2, a state may change the sign of what it has of a key."""
    step_bias: str = "linear_attn.dt_bias"
    log_rate: str = "linear_attn.A_log"
    gated_norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"

    @property
    def value_heads(self) -> int:
        return self.heads * self.group

    @property
    def conv_channels(self) -> int:
        """The channels of one key head that are convolved."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def numbers(self) -> int:
        """See ``MixerRecipe``: the tokens that the convolution still sees, and then the matrices."""
        return (self.width - 1) * self.conv_channels + self.group * self.key_dim * self.value_dim

    @property
    def token_numbers(self) -> int:
        return self.heads * (2 * self.conv_channels + 9 * self.group * self.value_dim + 2 * self.group)


@dataclass(frozen=True, slots=True)
class KimiDeltaRecipe:
    """A Kimi Delta Attention: a gated delta net whose decays are those of the channels of a key. Ranks split heads.

    Queries, keys and values are convolved by themselves.
    """

    heads: int
    channels: int
    """The channels of a head's query, key and value."""
    width: int
    """The tokens that a convolution sees."""
    norm: Norm
    """The norm of each head, whose output is multiplied by ``sigmoid(gate)``."""
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    convs: tuple[str, str, str] = ("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d")
    beta: str = "self_attn.b_proj"
    gate_down: str = "self_attn.g_a_proj"
    """The projection to as many numbers as a head has channels. ``gate_up`` leads from these to all heads' gates.

    Empty if ``gate_up`` leads from the layer's input to them.
    """
    gate_up: str = "self_attn.g_b_proj"
    step_down: str = "self_attn.f_a_proj"
    """The projection to as many numbers. ``step_up`` leads from these to the steps of each channel of each key.

    Empty if ``step_up`` leads from the layer's input to them.
    """
    step_up: str = "self_attn.f_b_proj"
    step_bias: str = "self_attn.dt_bias"
    log_rate: str = "self_attn.A_log"
    flat_rates: bool = False
    """Whether the tensor ``log_rate`` is ``[heads]``, and not ``[1, 1, heads, 1]``."""
    least_decay: float | None = None
    """What the logarithms of decays are above, if they are bounded: they are this times the sigmoid of a rated step."""
    gated_norm: str = "self_attn.o_norm"
    out: str = "self_attn.o_proj"

    @property
    def all_channels(self) -> int:
        """The channels of all heads."""
        return self.heads * self.channels

    @property
    def numbers(self) -> int:
        """See ``MixerRecipe``: the tokens that the convolutions still see, and then the matrices."""
        return (self.width - 1) * 3 * self.channels + self.channels * self.channels

    @property
    def token_numbers(self) -> int:
        return self.heads * (16 * self.channels + 1) + 2 * self.channels


@dataclass(frozen=True, slots=True)
class ShortConvRecipe:
    """A gated short convolution: ``out(gate * conv(other gate * input))``. Ranks split the channels."""

    heads: int
    """The parts of so many ``channels`` that all channels consist of."""
    channels: int
    width: int
    """The tokens that the convolution sees."""
    biased: bool = False
    inner: str = "conv.in_proj"
    """The projection to the gate before the convolution, the one behind it, and the input."""
    conv: str = "conv.conv"
    out: str = "conv.out_proj"

    @property
    def numbers(self) -> int:
        return (self.width - 1) * self.channels

    @property
    def token_numbers(self) -> int:
        return 6 * self.heads * self.channels


@dataclass(frozen=True, slots=True)
class Mamba2Recipe:
    """A Mamba 2. Heads of one group are written and read with the same, and normalised together.

    A group is cut into ``parts``, each of which keeps the tokens that the convolution of its group still sees, so that
    ranks can split groups.
    """

    heads: int
    """The parts of all groups."""
    group: int
    """The heads of a part."""
    head_dim: int
    size: int
    """The numbers of a state for each channel of a head."""
    width: int
    """The tokens that the convolution sees."""
    norm: Norm | None
    """The norm of each group's outputs, after these are multiplied by ``silu(gate)``; None if there is none."""
    parts: int = 1
    """The parts of a group."""
    gate_after_norm: bool = False
    """Whether outputs are multiplied by ``silu(gate)`` after their norm."""
    scales: tuple[float, float, float, float, float] | None = None
    """What gates, inputs, what these are written with, what they are read with, and steps are multiplied by."""
    biased: bool = False
    """Whether ``inner`` has a bias."""
    out_biased: bool = False
    conv_biased: bool = True
    inner: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    step_bias: str = "mamba.dt_bias"
    log_rate: str = "mamba.A_log"
    skip: str = "mamba.D"
    gated_norm: str = "mamba.norm"
    out: str = "mamba.out_proj"

    @property
    def groups(self) -> int:
        return self.heads // self.parts

    @property
    def all_conv_channels(self) -> int:
        """The channels that are convolved, each counted once."""
        return self.heads * self.group * self.head_dim + 2 * self.groups * self.size

    @property
    def conv_channels(self) -> int:
        """The channels of one part that are convolved."""
        return self.group * self.head_dim + 2 * self.size

    @property
    def numbers(self) -> int:
        """See ``MixerRecipe``: the tokens that the convolution still sees, and then the matrices."""
        return (self.width - 1) * self.conv_channels + self.group * self.head_dim * self.size

    @property
    def token_numbers(self) -> int:
        inputs = 2 if self.parts == 1 else 3
        return self.heads * (inputs * self.conv_channels + 8 * self.group * self.head_dim + self.group)


@dataclass(frozen=True, slots=True)
class MambaRecipe:
    """A Mamba, the first. Each channel has numbers of its own; ranks split the channels."""

    heads: int
    """The parts of so many ``channels`` that all channels consist of."""
    channels: int
    size: int
    """The numbers of each channel."""
    rank: int
    """The numbers that the lengths of all channels' steps are made of."""
    width: int
    """The tokens that the convolution sees."""
    norm: Norm | None
    """The norm of what steps are made of, and of what channels are written and read with, if there is one."""
    biased: bool = False
    """Whether ``inner`` and ``out`` have biases."""
    conv_biased: bool = True
    inner: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    selecting: str = "mamba.x_proj"
    """The projection to what steps are made of, and to what channels are written and read with."""
    steps: str = "mamba.dt_proj"
    log_rate: str = "mamba.A_log"
    skip: str = "mamba.D"
    norms: tuple[str, str, str] = ("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm")
    out: str = "mamba.out_proj"

    @property
    def numbers(self) -> int:
        """See ``MixerRecipe``: the tokens that the convolution still sees, and then the numbers of the channels."""
        return (self.width - 1 + self.size) * self.channels

    @property
    def token_numbers(self) -> int:
        return 12 * self.heads * self.channels + 8 * self.heads * (self.rank + 2 * self.size)


@dataclass(frozen=True, slots=True)
class LightningRecipe:
    """A lightning attention: each head has a matrix, which decays at a rate of its own. Ranks split heads."""

    slopes: tuple[float, ...]
    """What the logarithm of each head's matrix loses with each token."""
    channels: int
    """The channels of a head's query, key and value."""
    norm: Norm
    """The norm of all heads together, whose output is multiplied by ``sigmoid(gate)``."""
    inner: str = "self_attn.qkv_proj"
    """The projection to each head's query, key and value, of which then silu is taken."""
    gate: str = "self_attn.output_gate"
    normed: str = "self_attn.norm"
    out: str = "self_attn.out_proj"

    @property
    def heads(self) -> int:
        return len(self.slopes)

    @property
    def numbers(self) -> int:
        return self.channels * self.channels

    @property
    def token_numbers(self) -> int:
        return 16 * self.heads * self.channels


class NormOrder(enum.Enum):
    """Where the norms of a layer stand, and so how many they are. A layer of one part has half of them."""

    PRE = "pre"
    """Before attention, and before the feed-forward part."""
    POST = "post"
    """After attention, and after the feed-forward part, before each is added to the residual."""
    SANDWICH = "sandwich"
    """Before and after attention, and before and after the feed-forward part."""
    PARALLEL = "parallel"
    """One before both parts, which are added together; or, if two are named, one before each."""
    NORMED = "normed"
    """Before attention, and before the feed-forward part. What a norm gives is the residual from there on."""


@dataclass(frozen=True, slots=True)
class PartScales:
    """What goes into the parts of a layer, and what comes out, is multiplied by these."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mixer_in: float = 1.0
    mixer_out: float = 1.0
    feed_forward_out: float = 1.0
    mixing_residual: float = 1.0
    """What the residual is multiplied by beside attention or a mixer, if ``order`` is ``NORMED``."""
    feeding_residual: float = 1.0
    """As well, beside the feed-forward part."""


@dataclass(frozen=True, slots=True)
class StreamsRecipe:
    """Several residuals side by side, which each part of a layer mixes (hyper-connections, Xie et al., 2026).

    All streams of a token, normalised together, give three weights by one product: with which they are summed to the
    input of the part, with which its output is added to each, and with which they are mixed, a matrix whose rows and
    columns are scaled to a sum of one in turn.
    """

    count: int
    iterations: int
    """How often rows and columns are scaled. With 0, there is no such matrix, and each stream stays as it is."""
    eps: float
    """What is added to sums by which is divided, and to the weights of the first sum."""
    norm: Norm
    """That of all streams of a token. It has no weights."""
    magnitude: float = 2.0
    """The largest weight with which an output is added."""
    output_eps: float = 0.0
    """What is added to such weights."""
    mix: str = "hc_attn"
    """What the names of the tensors begin with, within the layer: for the part that mixes tokens."""
    feed: str = "hc_ffn"
    """What they begin with for the feed-forward part."""
    head: str = "model.hc_head.hc"
    """What those of the sum behind the last layer begin with, within the model; empty if it is the mean."""


@dataclass(frozen=True, slots=True)
class GatedStreamsRecipe:
    """Several residuals side by side, of which each part of a layer is given a mean with gates (Qwen 4, 2026).

    All streams of a token, each normalised by itself, give the gates of their channels, by two products with silu
    between, and the weights with which the part's output is added to each stream.
    """

    count: int
    rank: int
    """The numbers that gates are made of."""
    norm: Norm
    """That of each stream."""
    mix: str = "attn_hyper_connection"
    """What the names of the tensors begin with, within the layer: for the part that mixes tokens."""
    feed: str = "mlp_hyper_connection"
    """What they begin with for the feed-forward part."""
    head: str = "model.hyper_connection_mixer"
    """What those of the mean behind the last layer begin with, within the model."""


@dataclass(frozen=True, slots=True)
class AltUpRecipe:
    """Several residuals side by side, of which layers compute one (alternating updates, Baykal et al., 2023).

    Before a layer, something of all residuals is added to each of them. What the layer changes in the active one is
    then added to each. Both have weights, which follow from the active residual and from the layer's output.
    """

    count: int
    active: int
    """The number of the residual that is computed."""
    norm: Norm
    """That of what weights follow from, and of nothing else."""
    scaled: bool
    """Whether the active residual is multiplied by learned numbers before the layer's own input of a token."""
    layer: str = "altup"
    """What the names of the tensors begin with, within the layer."""
    before: str = "model.altup_projections"
    """What those of the products begin with, within the model, that make all residuals but the first."""
    behind: str = "model.altup_unembed_projections"
    """What those begin with of the products before the mean of all residuals."""


@dataclass(frozen=True, slots=True)
class LowRankRecipe:
    """Two products, by which a norm's output comes beside attention: ``x + norm(up(down(x)))``.

    The residual, attention and this are then multiplied by the root of a half.
    """

    rank: int
    down: str = "laurel.linear_left"
    up: str = "laurel.linear_right"
    norm: str = "laurel.post_laurel_norm"


@dataclass(frozen=True, slots=True)
class NgramRecipe:
    """What the last tokens add to several residuals before a layer: vectors of hashed n-grams (Qwen 4, 2026).

    An n-gram is a token and those before it, of which none before the newest is ``end``. Its ids, multiplied and
    combined by exclusive or, give a row in the table of each of ``heads``. All vectors of a token give a value, and a
    key for each stream, which say by their product with the stream how much of the value it gets. A convolution sees
    every ``before + 1``-th of the last tokens' values.
    """

    multipliers: tuple[int, ...]
    """The first multiplies the newest id, the next one that before it. The longest n-gram has as many tokens."""
    sizes: tuple[int, ...]
    """The rows of each head's table, one behind the other: those of pairs of tokens first."""
    rows: int
    """Those of all tables, and padding."""
    channels: int
    """The channels of one head's vector."""
    end: int
    width: int
    """The tokens that the convolution sees."""
    stream_channels: int
    """The channels of all streams."""
    norm: Norm
    """That of each stream, of its keys and of its values."""
    name: str = "ple"
    """What the names of the tensors begin with, within the layer."""

    @property
    def before(self) -> int:
        """The tokens before the newest one in the longest n-gram."""
        return len(self.multipliers) - 1

    @property
    def heads(self) -> int:
        """The heads of n-grams of each length."""
        return len(self.sizes) // self.before

    @property
    def seen(self) -> int:
        """The tokens before the newest one among which are those that the convolution sees."""
        return (self.width - 1) * len(self.multipliers)

    @property
    def numbers(self) -> int:
        """The fp32 numbers of a layer's state: ids of tokens, and what the convolution still sees."""
        return self.before * self.before + self.seen * self.stream_channels


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """Attention, a mixer, or both beside each other, and then a feed-forward part; or one of the two, or nothing."""

    attention: AttentionRecipe | None
    feed_forward: FeedForwardRecipe | None
    norm: Norm
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """The names of the norms, in the order of ``order``; empty where there is none."""
    other_norm: Norm | None = None
    """Every second norm, if it is another one: one behind a part of a sandwich, or before the feed-forward part."""
    order: NormOrder = NormOrder.PRE
    residual_scale: float = 1.0
    """What the outputs of both parts are multiplied by."""
    per_layer: PerLayerInput | None = None
    factor: str = ""
    """The tensor, by its whole name, of the number by which the residual is multiplied at the end of the layer."""
    mixer: MixerRecipe | None = None
    """A part with a state, which is given what attention is given, and whose output is added to attention's."""
    scales: PartScales = PartScales()
    streams: StreamsRecipe | GatedStreamsRecipe | AltUpRecipe | None = None
    """How the residuals are mixed if there are several. All layers have the same."""
    beside: LowRankRecipe | None = None
    """What is computed beside attention, if ``order`` is ``SANDWICH``."""
    ngrams: NgramRecipe | None = None
    """What is added to the residuals before the layer, if there are several."""
    shortcut: ExpertsRecipe | None = None
    """Experts that are given what the feed-forward part is. What they give is added at the end of the next layer."""

    @property
    def feeding(self) -> tuple[FeedForwardRecipe, ...]:
        """What feeds each token through by itself."""
        return tuple(part for part in (self.feed_forward, self.shortcut) if part is not None)


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A table with a vector for each position, which is added to the embedding."""

    name: str
    rows: int
    offset: int = 0
    """The row of position 0."""


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """An input of each layer for each token: of a second embedding, and projected from the first."""

    rows: int
    """The tokens that the second embedding has."""
    channels: int
    """The channels of one layer's input."""
    embedding: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    """The norm of what is projected, of the kind of the model's last one."""


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """A layer behind the last one that predicts the token after the next one (multi-token prediction).

    At each position it is given the hidden state of the model, after the last norm, and the embedding of the next
    token. Both are normalised and projected side by side, the embedding first. Then comes ``layer``, with keys and
    values of its own, and a norm. The head is the model's. What it gives takes the place of the model's hidden state
    where it drafts further.
    """

    layer: LayerRecipe
    tensors: str
    """What the names of all its tensors begin with."""
    prefix: str
    """What the names of those of ``layer`` begin with."""
    projection: str
    """Files that have this tensor have such a layer."""
    embedding_norm: str
    hidden_norm: str
    last_norm: str
    copies: tuple[str, ...] = ()
    """What names begin with of tensors that are the model's embedding and head once more."""


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """A whole model. Names are those of tensors, without ``.weight`` or ``.bias``."""

    layers: tuple[LayerRecipe, ...]
    norm: Norm
    """The last one, before the head."""
    tied: bool
    """Whether the head has the weights of the embedding."""
    embedding: str = "model.embed_tokens"
    image_tokens: int = 0
    """The rows that the embedding has behind those of the vocabulary, for tokens that are in no text."""
    embedding_scale: float = 1.0
    """What the embedding is multiplied by, in the numbers of the weights."""
    embedding_norm: Norm | None = None
    """A norm without weights of the embedding."""
    positions: LearnedPositions | None = None
    per_layer: PerLayerEmbedding | None = None
    layer_prefix: str = "model.layers."
    """What stands before the number of a layer in the names of its tensors."""
    layers_a_number: int = 1
    """So many of the layers have one number in the names of tensors."""
    last_norm: str = "model.norm"
    """Empty if there is none."""
    head: str = "lm_head"
    head_biased: bool = False
    precise_head: bool = False
    """Whether a head that is not tied computes in fp32 whatever the numbers of the model."""
    logits_scale: float = 1.0
    logits_cap: float | None = None
    """Logits ``x`` become ``cap * tanh(x / cap)``."""
    renamed: tuple[tuple[str, str], ...] = ()
    """What names of a larger model's tensors begin with, and what with in this one. Each applies in turn."""
    unused: tuple[str, ...] = ()
    """The beginnings of the names, as renamed, of tensors that belong to other parts of a larger model."""
    unused_ends: tuple[str, ...] = ()
    """The ends of the names of tensors that are no weights, such as masks."""
    draft: DraftRecipe | None = None
    """The layer that drafts tokens; None if the family, or the files, have none. Files may leave it out."""

    def unread(self, *, drafts: bool) -> tuple[str, ...]:
        """Returns the beginnings of the names of tensors that are not read, if tokens are drafted or not."""
        if self.draft is None:
            return self.unused
        return (*self.unused, *(self.draft.copies if drafts else (self.draft.tensors,)))

    def without_draft(self) -> ModelRecipe:
        """Returns the recipe for files that have no layer that drafts tokens, or not all of it."""
        return replace(self, draft=None, unused=self.unread(drafts=False))

    def prefix(self, index: int) -> str:
        """Returns what the names of the tensors of layer ``index`` begin with."""
        return f"{self.layer_prefix}{index // self.layers_a_number}."

    @property
    def attention(self) -> list[AttentionRecipe]:
        """The attention of those layers that have some."""
        return [layer.attention for layer in self.layers if layer.attention is not None]


def own_name(name: str, renamed: Iterable[tuple[str, str]]) -> str:
    """Returns the name that a tensor of a larger model has in the model itself. See ``ModelRecipe.renamed``."""
    for before, after in renamed:
        if name.startswith(before):
            name = after + name.removeprefix(before)
    return name
