"""Builds a model from its recipe, and computes it layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FallbackConfig, FamilyConfig
from pdserve.models.layer_groups import Place, layer_groups
from pdserve.models.parts.attention import BlockAttention, HeadBlockAttention, SelfAttention
from pdserve.models.parts.experts import BesideExperts, Experts
from pdserve.models.parts.feed_forward import FeedForward, Mlp
from pdserve.models.parts.latent import LatentAttention, SharedKvAttention
from pdserve.models.parts.layer_ends import (
    HALF,
    AddedInput,
    AltUp,
    Connection,
    GatedConnection,
    LayerEnd,
    LowRank,
    Ngrams,
    PerLayerInputs,
    load_added_input,
    load_layer_end,
    stream_ends,
)
from pdserve.models.parts.mixers import Mixer, build_mixer
from pdserve.models.parts.norms import LoadedNorm, load_norm
from pdserve.models.parts.projections import Building
from pdserve.models.parts.rotary import PositionTables, position_logs, query_scales, rotary_table
from pdserve.models.parts.vocabulary import PositionTable, VocabParallelEmbedding, vocab_parallel_head
from pdserve.models.rank_cache import StepCache
from pdserve.models.recipe import (
    AltUpRecipe,
    AttentionRecipe,
    DraftRecipe,
    ExpertsRecipe,
    GatedStreamsRecipe,
    LayerRecipe,
    MlpBesideExperts,
    MlpRecipe,
    NgramRecipe,
    NormOrder,
    QueryScale,
    Rotary,
    StreamsRecipe,
)
from pdserve.models.table import FAMILIES
from pdserve.wire.cache_groups import Keep
from pdserve_kernels.contract import Linear


class Decoder(Protocol):
    """Maps token ids and positions to hidden states, and hidden states to logits for the rows that need them."""

    @property
    def capturable(self) -> bool:
        """Whether a step does the same operations for all inputs, so that a recorded one may be replayed."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: StepCache) -> torch.Tensor:
        """Maps ids and positions, both ``[tokens]``, to ``[tokens, hidden_size]``, before the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps ``[rows, hidden_size]`` to fp32 ``[rows, vocab_size]``."""

    @property
    def drafter(self) -> Drafter | None:
        """What drafts tokens, if it has been asked for."""


class Drafter(Protocol):
    """Drafts tokens that follow those which the model has computed."""

    def begun(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states ``[tokens, hidden_size]`` that ``Decoder.forward`` gave to those that drafts begin with.

        It changes neither their shape nor those that are given.
        """

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: StepCache
    ) -> torch.Tensor:
        """Maps hidden states at ``positions``, and the ids of the tokens behind these, to hidden states that know both.

        Ids and positions are ``[tokens]``, hidden states ``[tokens, hidden_size]``. ``cache`` has the attention of the
        group that keeps whole contexts, and no other.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps what ``forward`` gave, ``[rows, hidden_size]``, to fp32 logits ``[rows, vocab_size]`` of the tokens
        after the next ones; on ranks other than 0 to ``[rows, 0]``."""


def build_decoder(
    config: DecoderConfig, building: Building, max_positions: int, dtype: torch.dtype, *, drafts: bool = False
) -> Decoder:
    """Returns this rank's part of the model, for contexts of up to ``max_positions``. ``drafts`` asks for its drafter.

    Raises ModelError if the checkpoint lacks a tensor, has one too many, or cannot be split over the ranks, or if it is
    a fallback model and paged attention would change its tokens, or if there are to be drafts and no layer has them.
    """
    if drafts and not config.has_draft_layer:
        raise ModelError(
            f"{building.checkpoint.path} has no layer that drafts tokens: its files have none (MTP), or the "
            f"{config.family} family has none here"
        )
    match config:
        case FamilyConfig():
            building.checkpoint.check_formats()
            # Built without weights first: what is missing or unknown, or has another shape, shows before any is read.
            RecipeDecoder(config, building.unread(), max_positions, dtype, drafts=drafts)
            return RecipeDecoder(config, building, max_positions, dtype, drafts=drafts)
        case FallbackConfig():
            return _fallback_decoder(config, building, dtype)
        case _:
            raise TypeError(f"{type(config).__name__} has no decoder")


def _fallback_decoder(config: FallbackConfig, building: Building, dtype: torch.dtype) -> Decoder:
    if building.tp.size > 1:
        raise ModelError(
            f"--tensor-parallel-size {building.tp.size} is for {sorted(FAMILIES)}; a {config.family} model has one rank"
        )
    # This import loads the parts of transformers that compute: about 2 s, and other families do not need them.
    from pdserve.models.fallback.hf_check import checked_hf_decoder

    return checked_hf_decoder(building.checkpoint.path, config, building.kernels, dtype, building.checkpoint.device)


class RecipeDecoder:
    """Satisfies ``Decoder``."""

    def __init__(
        self, config: FamilyConfig, building: Building, max_positions: int, dtype: torch.dtype, *, drafts: bool = False
    ) -> None:
        """Takes every tensor of the checkpoint, those of the layer that drafts tokens only for ``drafts``.

        Raises ModelError on a missing or unknown one.
        """
        checkpoint, recipe = building.checkpoint, config.recipe
        checkpoint.unwrap(recipe.renamed, recipe.unread(drafts=drafts), recipe.unused_ends)
        draft = recipe.draft if drafts else None
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = VocabParallelEmbedding(building, recipe.embedding, shape, further=recipe.image_tokens)
        # The factor is rounded like the weights, because models are trained with the rounded one.
        self._embedding_scale = torch.tensor(recipe.embedding_scale, dtype=dtype).item()
        self._embedding_norm: LoadedNorm | None = None
        if recipe.embedding_norm is not None:
            self._embedding_norm = load_norm(building, recipe.embedding_norm, "", config.hidden_size)
        self._positions: PositionTable | None = None
        if recipe.positions is not None:
            self._positions = PositionTable(building, recipe.positions, config.hidden_size, max_positions)
        drafting = [] if draft is None or draft.layer.attention is None else [draft.layer.attention]
        kinds = [_positions_of(config, part) for part in (*recipe.attention, *drafting)]
        distinct = list(dict.fromkeys(kinds))
        self._per_layer: PerLayerInputs | None = None
        if recipe.per_layer is not None:
            self._per_layer = PerLayerInputs(config, building, recipe.per_layer, dtype)
        parts = _Parts(config, building, distinct)
        self._layers = [parts.layer(i) for i in range(len(recipe.layers))]
        for i, layer in reversed(list(enumerate(recipe.layers))):
            if layer.shortcut is not None:
                self._layers[i : i + 2] = [parts.shortcut(layer.shortcut, parts.prefix(i), *self._layers[i : i + 2])]
        streams = recipe.layers[0].streams
        self._streams = None if streams is None else stream_ends(config.hidden_size, building, streams)
        self._norm: LoadedNorm | None = None
        if recipe.last_norm:
            self._norm = load_norm(building, recipe.norm, recipe.last_norm, config.hidden_size)
        self._head = vocab_parallel_head(building, self._embedding, shape, recipe)
        positions = max_positions if checkpoint.device.type != "meta" else 1
        where = (positions, dtype, checkpoint.device)
        growing = any(part.latent is not None and part.latent.head_scales is not None for part in recipe.attention)
        logs = position_logs(*where) if growing else None
        self._tables = [
            PositionTables(*rotary_table(rotary, head_dim, *where, learned), query_scales(scale, *where), logs)
            for (rotary, scale, head_dim), learned in zip(distinct, _learned(building, distinct), strict=True)
        ]
        self._draft: _DraftLayer | None = None
        if draft is not None:
            self._draft = _DraftLayer(
                load_norm(building, recipe.norm, draft.embedding_norm, config.hidden_size),
                load_norm(building, recipe.norm, draft.hidden_norm, config.hidden_size),
                building.linear(building.weight(f"{draft.projection}.weight", (shape[1], 2 * shape[1]))),
                parts.draft(draft),
                load_norm(building, recipe.norm, draft.last_norm, config.hidden_size),
            )
        checkpoint.check_all_taken()
        index = None if config.latent is None else config.latent.index
        chosen_one_by_one = config.blocks is None and (index is None or index.pool == 1)
        # The rows of entries that a step reads, its scored index keys, and its blocks and pools that become whole,
        # depend on its contexts.
        self.capturable = config.shared is None and config.head_blocks is None and chosen_one_by_one

    @property
    def drafter(self) -> Drafter | None:
        return None if self._draft is None else _LayerDrafter(self, self._draft)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, cache: StepCache) -> torch.Tensor:
        residual = self.embedded(token_ids)
        inputs = None if self._per_layer is None else self._per_layer(token_ids, residual)
        step = self.step(token_ids, positions, cache, inputs)
        if self._embedding_norm is not None:
            residual = self._embedding_norm(residual)
        if self._positions is not None:
            residual = residual + self._positions(positions)
        delta: torch.Tensor | None = None
        if self._streams is not None:
            residual = self._streams[0](residual)
        for layer in self._layers:
            delta, residual = layer(residual, delta, step)
        if self._streams is not None:
            residual = self._streams[1](residual)
        return residual if delta is None else residual + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.normed(hidden))

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps ids ``[tokens]`` to ``[tokens, hidden_size]``."""
        found = self._embedding(token_ids)
        return found if self._embedding_scale == 1.0 else found * self._embedding_scale

    def step(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: StepCache, inputs: torch.Tensor | None = None
    ) -> Step:
        """Returns what layers are given for these tokens at ``positions``, both ``[tokens]``."""
        return Step([table.at(positions) for table in self._tables], cache, token_ids, self._tables, inputs)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the last norm, if there is one."""
        return hidden if self._norm is None else self._norm(hidden)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """Maps normalised ``[rows, hidden_size]`` to fp32 ``[rows, vocab_size]``."""
        return self._head(normed)


@dataclass(frozen=True, slots=True)
class _DraftLayer:
    """The layer of a ``DraftRecipe``."""

    embedding_norm: LoadedNorm
    hidden_norm: LoadedNorm
    project: Linear
    layer: Layer
    last_norm: LoadedNorm

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps embeddings and hidden states, both ``[tokens, hidden_size]``, to normalised ones."""
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), 1)
        delta, residual = self.layer(self.project(both), None, step)
        return self.last_norm(residual) if delta is None else self.last_norm.of_sum(delta, residual)[0]


@dataclass(frozen=True, slots=True)
class _LayerDrafter:
    """Satisfies ``Drafter`` with a layer of the model."""

    decoder: RecipeDecoder
    layer: _DraftLayer

    def begun(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.normed(hidden)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: StepCache
    ) -> torch.Tensor:
        return self.layer(self.decoder.embedded(token_ids), hidden, self.decoder.step(token_ids, positions, cache))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.head(hidden)


def _positions_of(config: FamilyConfig, part: AttentionRecipe) -> tuple[Rotary | None, QueryScale | None, int]:
    """Returns what tells a layer's kind of positions: how heads turn, and how many channels they have."""
    of_some = part.latent or part.shared
    channels = config.of_layer(part).head_dim if of_some is None else of_some.turned
    channels = channels if part.head_blocks is None else part.head_blocks.head_dim
    return part.rotary, part.query_scale, channels


def _learned(
    building: Building, kinds: Sequence[tuple[Rotary | None, QueryScale | None, int]]
) -> list[torch.Tensor | None]:
    """Takes what frequencies of each kind are multiplied by; None where they are as they are, or have no numbers."""
    checkpoint, taken = building.checkpoint, dict[str, torch.Tensor]()
    for rotary, _, channels in kinds:
        if rotary is not None and rotary.learned and rotary.learned not in taken:
            taken[rotary.learned] = checkpoint.take(rotary.learned, (channels // 2,), dtype=torch.float32)
    known = {name: each for name, each in taken.items() if each.device.type != "meta"}
    return [None if rotary is None else known.get(rotary.learned) for rotary, _, _ in kinds]


class _Parts:
    """Builds the parts of a model's layers, in the order in which these are asked for."""

    def __init__(
        self, config: FamilyConfig, building: Building, kinds: Sequence[tuple[Rotary | None, QueryScale | None, int]]
    ) -> None:
        """``kinds`` are those of positions, in the order of a step's tables."""
        self._config, self._building, self._kinds = config, building, kinds
        self._places = layer_groups(config)
        latents = [part.latent for part in config.recipe.attention if part.latent is not None]
        self._giving = {latent.key_from for latent in latents}
        """The layers whose latents others have, too."""
        groups = list(enumerate(self._places.groups))
        self._of_attention = [number for number, group in groups if group.keep is not Keep.LATEST and group.layers]
        self._of_states = [number for number, group in groups if group.keep is Keep.LATEST]

    def prefix(self, index: int) -> str:
        return self._config.recipe.prefix(index)

    def layer(self, index: int) -> Layer:
        """Returns layer ``index`` of the model, with what is done at its end."""
        recipe, prefix = self._config.recipe.layers[index], self.prefix(index)
        mix = self._mixing(recipe, prefix, index, self._places.attention[index], self._places.states[index])
        if isinstance(recipe.streams, AltUpRecipe):
            # What is added at its end goes to the residuals that it does not compute.
            return self._alternating(recipe, recipe.streams, prefix, index, mix)
        if recipe.streams is not None:
            layer = self._of_streams(recipe, recipe.streams, prefix, mix)
        else:
            feed = self._feeding(recipe, prefix)
            layer = _layer(self._building, recipe, prefix, self._config.hidden_size, mix, feed)
        if recipe.ngrams is not None:
            layer = self._with_ngrams(layer, recipe.ngrams, prefix, index)
        end = load_layer_end(self._config, self._building, recipe, prefix, index)
        return layer if end is None else _Ended(layer, end)

    def draft(self, draft: DraftRecipe) -> Layer:
        """Returns the layer that drafts tokens."""
        recipe, prefix = draft.layer, draft.prefix
        mix = self._mixing(recipe, prefix, self._config.num_layers, self._places.draft, None)
        return _layer(self._building, recipe, prefix, self._config.hidden_size, mix, self._feeding(recipe, prefix))

    def _of_streams(
        self, recipe: LayerRecipe, streams: StreamsRecipe | GatedStreamsRecipe, prefix: str, mix: Part | None
    ) -> Layer:
        feed, hidden, building = self._feeding(recipe, prefix), self._config.hidden_size, self._building
        parts = list[_Connected | _ByMean]()
        for number, (part, name) in enumerate(zip((mix, feed), (streams.mix, streams.feed), strict=True)):
            assert part is not None, "layers with several residuals have both parts"
            if isinstance(streams, GatedStreamsRecipe):
                parts.append(_ByMean(GatedConnection(hidden, building, streams, prefix + name), part))
                continue
            loaded = load_norm(building, recipe.norm, prefix + recipe.norms[number], hidden)
            parts.append(_Connected(Connection(hidden, building, streams, prefix + name), loaded, part))
        return _OfStreams(*parts)

    def _alternating(
        self, recipe: LayerRecipe, streams: AltUpRecipe, prefix: str, index: int, mix: Part | None
    ) -> Layer:
        hidden, building = self._config.hidden_size, self._building
        layer = _layer(building, recipe, prefix, hidden, mix, self._feeding(recipe, prefix))
        added = load_added_input(self._config, building, recipe, prefix, index)
        return _Alternating(AltUp(hidden, building, streams, prefix), layer, added)

    def _with_ngrams(self, layer: Layer, recipe: NgramRecipe, prefix: str, index: int) -> Layer:
        place = self._places.ngrams[index]
        assert place is not None, "n-grams have a state"
        ngrams = Ngrams(self._config.hidden_size, self._building, recipe, prefix)
        return _WithNgrams(layer, ngrams, self._of_states.index(place.group), place.index)

    def _mixing(
        self, recipe: LayerRecipe, prefix: str, index: int, place: Place | None, state: Place | None
    ) -> Part | None:
        """Returns what lets the tokens of a layer see others: attention, a mixer or both; None if it has neither.

        ``place`` is where its keys and values are, and ``state`` its state.
        """
        config, building = self._config, self._building
        attend: Part | None = None
        mix: Part | None = None
        scales = recipe.scales
        if recipe.attention is not None and place is not None:
            table = self._kinds.index(_positions_of(config, recipe.attention))
            group = self._of_attention.index(place.group)
            built = (config, building, recipe.attention, prefix, place.index)
            if recipe.attention.shared is not None:
                entries = self._places.entries[index]
                attention = SharedKvAttention(*built, None if entries is None else entries.index)
                number = None if state is None else self._of_states.index(state.group)
                attend = _AttendToShared(attention, table, group, number, 0 if state is None else state.index)
            elif recipe.attention.blocks is not None:
                entries, number = self._places.entries[index], None if state is None else state.index
                assert entries is not None, "blocks have keys"
                of_state = None if state is None else self._of_states.index(state.group)
                attend = _AttendToBlocks(BlockAttention(*built, entries.index), table, of_state, number or 0)
            elif recipe.attention.head_blocks is not None:
                attend = _AttendToHeadBlocks(HeadBlockAttention(*built), table)
            elif recipe.attention.latent is None:
                attend = _Attend(SelfAttention(*built), table, group)
            else:
                attend = _AttendToLatents(
                    LatentAttention(*built), table, group, index if index in self._giving else None
                )
            attend = _scaled(attend, scales.attention_in, scales.attention_out)
        if recipe.mixer is not None and state is not None:
            mixer = build_mixer(config, building, recipe.mixer, prefix, index)
            mix = _scaled(
                _Mix(mixer, self._of_states.index(state.group), state.index), scales.mixer_in, scales.mixer_out
            )
        return _Both(attend, mix) if attend is not None and mix is not None else attend or mix

    def shortcut(self, recipe: ExpertsRecipe, prefix: str, layer: Layer, behind: Layer) -> Layer:
        """Returns a layer and the one behind it, with the experts of the first one's ``LayerRecipe.shortcut``."""
        assert isinstance(layer, _InTurn), "a layer with a shortcut has both parts in turn"
        return _Shortcut(layer, behind, _Feed(Experts(self._config.hidden_size, self._building, recipe, prefix)))

    def _feeding(self, layer: LayerRecipe, prefix: str) -> Part | None:
        part = layer.feed_forward
        if part is None:
            return None
        hidden, building = self._config.hidden_size, self._building
        match part:
            case MlpRecipe():
                feed: FeedForward = Mlp(hidden, building, part, prefix)
            case ExpertsRecipe():
                experts = Experts(hidden, building, part, prefix, self._config.vocab_size)
                if part.by_token:
                    return _FeedByToken(experts)
                feed = experts
            case MlpBesideExperts():
                feed = BesideExperts(hidden, building, part, layer.norm, prefix)
        return _scaled(_Feed(feed), 1.0, layer.scales.feed_forward_out)


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers are given in one step beside their input."""

    tables: Sequence[PositionTables]
    """Those of each kind of positions in the model, at the step's positions."""
    cache: StepCache
    token_ids: torch.Tensor
    """``[tokens]``"""
    whole: Sequence[PositionTables]
    """The tables of each kind, at all positions."""
    inputs: torch.Tensor | None = None
    """The inputs of the layers' ends, ``[tokens, layers, channels]``, if these have some."""
    latents: dict[int, torch.Tensor] = field(default_factory=dict)
    """The latents of the step's tokens that later layers have, too, ``[tokens, channels]``, by their layer."""


class Layer(Protocol):
    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Returns ``(delta, residual)``.

        ``delta`` is the output of the layer's last part, which the next norm adds to the residual in one pass; None if
        the residual has it already.
        """


class Part(Protocol):
    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps ``x``, normalised ``[tokens, hidden_size]``, to the same shape."""


def _layer(
    building: Building, recipe: LayerRecipe, prefix: str, hidden: int, mix: Part | None, feed: Part | None
) -> Layer:
    """Builds a layer of ``mix``, with which tokens see others, and ``feed``, the feed-forward part."""
    turns = cycle((recipe.norm, recipe.other_norm or recipe.norm))
    norms = [
        load_norm(building, kind, prefix + name, hidden) if name else None
        for kind, name in zip(turns, recipe.norms, strict=False)
    ]
    scale = recipe.residual_scale
    if mix is None or feed is None:
        part = mix if mix is not None else feed
        if part is None:
            return _passed
        match recipe.order:
            case NormOrder.PRE:
                (before,) = norms
                return _Single(part, scale, before, None)
            case NormOrder.POST:
                (after,) = norms
                return _Single(part, scale, None, after)
            case NormOrder.SANDWICH:
                before, after = norms
                return _Single(part, scale, before, after)
            case NormOrder.PARALLEL | NormOrder.NORMED:
                raise ModelError(f"the layer {prefix.rstrip('.')} has one part, and its norms are for two")
    match recipe.order:
        case NormOrder.PRE:
            before_mix, before_feed = norms
            return _InTurn(mix, feed, scale, before_mix, None, before_feed, None)
        case NormOrder.NORMED:
            before_mix, before_feed = norms
            scales = recipe.scales
            return _OnNormed(mix, feed, before_mix, before_feed, scales.mixing_residual, scales.feeding_residual)
        case NormOrder.POST:
            after_mix, after_feed = norms
            return _InTurn(mix, feed, scale, None, after_mix, None, after_feed)
        case NormOrder.SANDWICH:
            if recipe.beside is not None:
                beside = LowRank(hidden, building, recipe.beside, recipe.norm, prefix)
                before_mix, after_mix, before_feed, after_feed = norms
                return _WithLowRank(mix, feed, scale, before_mix, after_mix, before_feed, after_feed, beside)
            return _InTurn(mix, feed, scale, *norms)
        case NormOrder.PARALLEL:
            norm, *further = norms
            if norm is None:
                raise ModelError(f"the layer {prefix.rstrip('.')} has no norm before its parts")
            return _Parallel(mix, feed, scale, norm, *further)


@dataclass(frozen=True, slots=True)
class _Attend:
    """A layer's attention."""

    attend: SelfAttention
    table: int
    group: int

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.attend(x, step.tables[self.table], step.cache.attention[self.group])


@dataclass(frozen=True, slots=True)
class _AttendToLatents:
    """A layer's latent attention."""

    attend: LatentAttention
    table: int
    group: int
    gives: int | None
    """The number of the layer, if later ones have its latents, too."""

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        given = None if self.attend.source is None else step.latents[self.attend.source]
        out, latents = self.attend(x, step.tables[self.table], step.cache.latents[self.group], given)
        if self.gives is not None:
            step.latents[self.gives] = latents
        return out


@dataclass(frozen=True, slots=True)
class _AttendToHeadBlocks:
    """A layer's attention to chosen blocks, or beside layers that have it."""

    attend: HeadBlockAttention
    table: int

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.cache.head_blocks is not None, "a model with such layers plans for them"
        return self.attend(x, step.tables[self.table], step.cache.head_blocks)


@dataclass(frozen=True, slots=True)
class _AttendToShared:
    """A layer's attention to one vector of a token, with the entries that are not complete in a state."""

    attend: SharedKvAttention
    table: int
    group: int
    state_group: int | None
    state: int

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.cache.shared is not None, "a model with such layers plans for them"
        tables = step.tables[self.table], step.whole[self.table]
        states = None if self.state_group is None else step.cache.states[self.state_group].layers[self.state]
        return self.attend(x, *tables, step.cache.shared, self.group, states, self.state_group)


@dataclass(frozen=True, slots=True)
class _AttendToBlocks:
    """A layer's attention to chosen blocks, with the keys of one that is not complete in a state."""

    attend: BlockAttention
    table: int
    state_group: int | None
    state: int

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        assert step.cache.blocks is not None, "a model with such layers plans for them"
        tables = step.tables[self.table], step.whole[self.table]
        if self.state_group is None:
            return self.attend.of_blocks(x, *tables, step.cache.blocks, None, None)
        states = step.cache.states[self.state_group]
        return self.attend.of_blocks(x, *tables, step.cache.blocks, states.layers[self.state], states.runs)


@dataclass(frozen=True, slots=True)
class _Mix:
    """A layer's mixer, whose state is that of layer ``index`` of its group."""

    mix: Mixer
    group: int
    index: int

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        states = step.cache.states[self.group]
        return self.mix(x, states.layers[self.index], states.runs)


@dataclass(frozen=True, slots=True)
class _Both:
    """Attention and a mixer beside each other."""

    attend: Part
    mix: Part

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.attend(x, step) + self.mix(x, step)


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A part whose input and output are multiplied by numbers."""

    part: Part
    before: float
    after: float

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        given = x if self.before == 1.0 else x * self.before
        return _added(self.part(given, step), None, self.after)


def _scaled(part: Part, before: float, after: float) -> Part:
    return part if before == after == 1.0 else _Scaled(part, before, after)


@dataclass(frozen=True, slots=True)
class _Feed:
    feed: FeedForward

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.feed(x)


@dataclass(frozen=True, slots=True)
class _FeedByToken:
    """Experts that are chosen by token."""

    experts: Experts

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.experts(x, token_ids=step.token_ids)


@dataclass(frozen=True, slots=True)
class _Connected:
    """A part of a layer with several residuals, and the norm before it."""

    connection: Connection
    norm: LoadedNorm
    part: Part

    def __call__(self, streams: torch.Tensor, step: Step) -> torch.Tensor:
        given, spread, mixed = self.connection.opened(streams)
        return self.connection.closed(streams, self.part(self.norm(given), step), spread, mixed)


@dataclass(frozen=True, slots=True)
class _ByMean:
    """A part of a layer that is given a mean of several residuals, and is added to all of them."""

    connection: GatedConnection
    part: Part

    def __call__(self, streams: torch.Tensor, step: Step) -> torch.Tensor:
        given, spread = self.connection.opened(streams)
        return self.connection.closed(streams, self.part(given, step), spread)


@dataclass(frozen=True, slots=True)
class _WithNgrams:
    """A layer with several residuals, and what the last tokens add to these before it."""

    layer: Layer
    ngrams: Ngrams
    group: int
    index: int

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        states = step.cache.states[self.group]
        added = self.ngrams(residual, step.token_ids, states.layers[self.index], states.runs)
        return self.layer(residual + added, delta, step)


@dataclass(frozen=True, slots=True)
class _OfStreams:
    """A layer with several residuals, ``[tokens, count, hidden_size]``."""

    mix: _Connected | _ByMean
    feed: _Connected | _ByMean

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        return None, self.feed(self.mix(residual, step), step)


@dataclass(frozen=True, slots=True)
class _InTurn:
    """The part that mixes tokens, and then the feed-forward part, each with a norm before it, behind it, or both."""

    mix: Part
    feed: Part
    scale: float
    before_mix: LoadedNorm | None
    after_mix: LoadedNorm | None
    before_feed: LoadedNorm | None
    after_feed: LoadedNorm | None

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.mixed(residual, delta, step)
        return self.fed(normed, step), residual

    def mixed(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the feed-forward part is given, and the residual."""
        normed, residual = _normed(self.before_mix, delta, residual)
        mixed = _added(self.mix(normed, step), self.after_mix, self.scale)
        return _normed(self.before_feed, mixed, residual)

    def fed(self, normed: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns what the feed-forward part adds to the residual."""
        return _added(self.feed(normed, step), self.after_feed, self.scale)


@dataclass(frozen=True, slots=True)
class _WithLowRank(_InTurn):
    """Both parts in turn, and two small products beside the first."""

    beside: LowRank

    def mixed(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = _normed(self.before_mix, delta, residual)
        mixed = residual + _added(self.mix(normed, step), self.after_mix, self.scale)
        return _normed(self.before_feed, None, (mixed + self.beside(normed)) * HALF)


@dataclass(frozen=True, slots=True)
class _Alternating:
    """A layer that computes one of several residuals, ``[tokens, count, hidden_size]``.

    What it adds by its own input of a token goes to all but the first.
    """

    altup: AltUp
    layer: Layer
    added: AddedInput | None

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        predicted = self.altup.predicted(residual)
        delta, active = self.layer(predicted[:, self.altup.active].contiguous(), None, step)
        corrected = self.altup.corrected(predicted, active if delta is None else active + delta)
        if self.added is not None and step.inputs is not None:
            corrected[:, 1:] += self.added(self.altup.scaled(corrected), step.inputs).unsqueeze(1)
        return None, corrected


@dataclass(frozen=True, slots=True)
class _OnNormed:
    """Both parts in turn, each of which is added to what the norm before it gives."""

    mix: Part
    feed: Part
    before_mix: LoadedNorm | None
    before_feed: LoadedNorm | None
    mixing_residual: float
    feeding_residual: float

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = _normed(self.before_mix, delta, residual)
        mixed = self.mix(normed, step)
        normed, _ = _normed(self.before_feed, mixed, normed * self.mixing_residual)
        return self.feed(normed, step), normed * self.feeding_residual


@dataclass(frozen=True, slots=True)
class _Shortcut:
    """Two layers, and experts that are given what the first one's feed-forward part is, and are added at the end."""

    first: _InTurn
    second: Layer
    experts: Part

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.first.mixed(residual, delta, step)
        beside = self.experts(normed, step)
        delta, residual = self.second(residual, self.first.fed(normed, step), step)
        return beside if delta is None else delta + beside, residual


@dataclass(frozen=True, slots=True)
class _Parallel:
    """Both parts beside each other, after one norm or one each."""

    mix: Part
    feed: Part
    scale: float
    norm: LoadedNorm
    feed_norm: LoadedNorm | None = None

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = _normed(self.norm, delta, residual)
        fed = normed if self.feed_norm is None else self.feed_norm(residual)
        return _added(self.mix(normed, step) + self.feed(fed, step), None, self.scale), residual


@dataclass(frozen=True, slots=True)
class _Single:
    """One part."""

    part: Part
    scale: float
    before: LoadedNorm | None
    after: LoadedNorm | None

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = _normed(self.before, delta, residual)
        return _added(self.part(normed, step), self.after, self.scale), residual


def _passed(residual: torch.Tensor, delta: torch.Tensor | None, step: Step) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A layer without a part."""
    return delta, residual


@dataclass(frozen=True, slots=True)
class _Ended:
    """A layer, and what is done with the residual at its end."""

    layer: Layer
    end: LayerEnd

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        delta, residual = self.layer(residual, delta, step)
        return None, self.end(residual if delta is None else residual + delta, step.inputs)


def _normed(
    norm: LoadedNorm | None, delta: torch.Tensor | None, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normalised sum of residual and delta, and the sum. Without a norm both are the sum."""
    if norm is None:
        total = residual if delta is None else residual + delta
        return total, total
    return (norm(residual), residual) if delta is None else norm.of_sum(delta, residual)


def _added(output: torch.Tensor, norm: LoadedNorm | None, scale: float) -> torch.Tensor:
    """Returns what a part's output adds to the residual."""
    output = output if norm is None else norm(output)
    return output if scale == 1.0 else output * scale
