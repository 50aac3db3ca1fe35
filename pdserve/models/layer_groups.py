"""Says which layers of a model share a cache group, and divides a cache's memory among the groups. It loads no torch.

Groups with a window, and states, need no more than what the requests of a batch have of them at a time. They get that,
as much again for blocks that transfers bring or take, and a share for the prefix cache; the rest of the memory holds
whole contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as counted

from pdserve.config import KvCacheDtype
from pdserve.errors import ConfigError, ModelError
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FamilyConfig
from pdserve.wire.cache_groups import ALIGNMENT, Keep

STATE_BYTES = 4
"""The bytes of a number of a state, which is fp32 whatever the numbers of the model are."""


@dataclass(frozen=True, slots=True)
class Entries:
    """What a layer keeps of a context in entries that stand for several tokens each."""

    every: int
    """The tokens of an entry. A block has the entries whose last tokens it has."""
    channels: int

    def in_block(self, block_size: int) -> int:
        """Returns how many entries a block has room for."""
        return -(-block_size // self.every)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Some layers of a model, whose blocks have one shape and are kept by one rule."""

    name: str
    keep: Keep
    layers: int
    heads: int
    """The KV heads, or the units of a state, on all ranks together; 0 if every rank has the whole state."""
    numbers: int
    """The channels of a head, or the numbers of one unit of a state."""
    window: int = 0
    """As in ``GroupSpec``."""
    shared_channels: int = 0
    """As in ``KvLayout``."""
    queries: int = 0
    """The query heads on all ranks together; 0 for a state."""
    entries: tuple[Entries, ...] = ()
    """Those of each layer, if the group has entries. A block is one layer of its bytes, in which they share the room of
    each token: ``numbers`` is 0."""
    beside: tuple[Entries, ...] = ()
    """Those of each layer that has entries beside its keys and values. Every KV head has all of them, in the room of
    further layers, so that every rank has."""

    def stored_layers(self, block_size: int) -> int:
        """Returns the layers of a block's bytes: those of the group, and the room of the entries beside them."""
        entries = sum(each.in_block(block_size) * each.channels for each in self.beside)
        return self.layers + (-(-entries // (self.stored * block_size * self.numbers)) if entries else 0)

    def channels(self, block_size: int) -> int:
        """Returns the numbers of a head that a block has for each token."""
        if not self.entries:
            return self.numbers
        return -(-sum(each.in_block(block_size) * each.channels for each in self.entries) // block_size)

    @property
    def stored(self) -> int:
        """What is stored of a token and head: a key and a value, or a key alone."""
        return 1 if self.shared_channels else 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer has its part of the cache."""

    group: int
    index: int
    """Its number among the layers of the group."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model, of which the first keeps whole contexts and may have no layers."""

    groups: tuple[LayerGroup, ...]
    attention: tuple[Place | None, ...]
    """The keys and values that each layer of the model attends to; None for a layer without attention."""
    states: tuple[Place | None, ...]
    """The state of each layer; None for a layer without one."""
    draft: Place | None = None
    """The keys and values of the layer that drafts tokens, if there is one."""
    entries: tuple[Place | None, ...] = ()
    """The entries of each layer; None for a layer without."""
    ngrams: tuple[Place | None, ...] = ()
    """The state of what is before each layer; None for a layer with nothing before it."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What layers of one group have in common."""

    heads: int
    numbers: int
    window: int = 0
    """0 for layers that see all."""
    shared_channels: int = 0
    queries: int = 0


def layer_groups(config: DecoderConfig) -> LayerGroups:
    """Returns the groups of a model.

    The first has the layers that see whole contexts, or, if none does, those with the largest window: without layers
    that keep whole contexts, blocks may as well stay. Then come the other windows, and then each shape of a state.
    A layer that reads the keys and values of another one has its place. The layer that drafts tokens is the last one of
    its group. If layers have entries, these are the first group. Raises ModelError if layers that see whole contexts
    differ in their heads.
    """
    count = config.num_layers
    seen, states, entries, beside = _seen(config), _states(config), _entries(config), _beside(config)
    kept_entries = tuple(each for each in entries if each is not None)
    whole = _Kind(1, 0, shared_channels=1, queries=config.heads) if kept_entries else _whole(config, seen)
    kinds = dict.fromkeys([whole, *(kind for kind in seen if kind is not None)])
    groups, attention = list[LayerGroup](), list[Place | None]([None] * len(seen))
    for number, kind in enumerate(kinds):
        having = [index for index, found in enumerate(seen) if found == kind]
        for place, index in enumerate(having):
            attention[index] = Place(number, place)
        keep, window, name = Keep.WINDOW, kind.window, f"window {kind.window}"
        if number == 0:
            keep, window, name = Keep.ALL, 0, "whole contexts"
        elif any(group.window == window for group in groups):
            name += f", {kind.heads} heads of {kind.numbers}"
        shape = (kind.heads, kind.numbers, window, kind.shared_channels, kind.queries)
        held = kept_entries if number == 0 else ()
        own = tuple(each for each in beside if each is not None) if number == 0 else ()
        groups.append(LayerGroup(name, keep, 1 if held else len(having), *shape, entries=held, beside=own))
    for index, source in enumerate(_sources(config)):
        if source is not None:
            attention[index] = attention[source]
    # The states of layers, and then those of what is before them.
    states += _ngrams(config)
    shapes = dict.fromkeys(kind for kind in states if kind is not None)
    kept = list[Place | None]([None] * (2 * count))
    for number, kind in enumerate(shapes):
        having = [index for index, found in enumerate(states) if found == kind]
        for place, index in enumerate(having):
            kept[index] = Place(len(groups), place)
        name = f"state {number + 1}" if number else "state"
        groups.append(LayerGroup(name, Keep.LATEST, len(having), kind.heads, kind.numbers))
    draft = attention[count] if config.has_draft_layer else None
    numbers = counted()
    of_entries = tuple(
        None if each is None and other is None else Place(0, next(numbers))
        for each, other in zip(entries, beside, strict=True)
    )
    return LayerGroups(
        tuple(groups), tuple(attention[:count]), tuple(kept[:count]), draft, of_entries, tuple(kept[count:])
    )


def _whole(config: DecoderConfig, seen: list[_Kind | None]) -> _Kind:
    kinds = dict.fromkeys(kind for kind in seen if kind is not None)
    whole = [kind for kind in kinds if not kind.window]
    if len(whole) > 1:
        shapes = " and ".join(f"{kind.queries}, and {kind.heads} of {kind.numbers} for KV" for kind in whole)
        raise ModelError(f"its layers that see whole contexts have different heads: {shapes}")
    if whole or not kinds:
        return whole[0] if whole else _Kind(config.kv_heads, config.head_dim, queries=config.heads)
    return max(kinds, key=lambda kind: kind.window)


def _seen(config: DecoderConfig) -> list[_Kind | None]:
    """Returns the keys and values of each layer, and then of the one that drafts tokens, if there is one.

    Layers of fallback models all keep whole contexts.
    """
    plain = _Kind(config.kv_heads, config.head_dim, queries=config.heads)
    if not isinstance(config, FamilyConfig):
        return [plain] * config.num_layers
    found: list[_Kind | None] = []
    layers = list(zip(config.recipe.layers, config.windows, strict=True))
    if config.recipe.draft is not None:
        layers.append((config.recipe.draft.layer, None))
    for layer, window in layers:
        part = layer.attention
        if part is None or part.kv_from is not None:
            found.append(None)
        else:
            own = config.of_layer(part)
            shared = 0 if part.latent is None else part.latent.rank
            shared = shared if part.shared is None else own.head_dim
            found.append(_Kind(own.kv_heads, own.head_dim, window or 0, shared, own.heads))
    whole = next((kind for kind in found if kind is not None and not kind.window), None)
    # A window that no context fills is none, unless its layers would not fit those that see whole contexts.
    wide = {kind for kind in found if kind is not None and kind.window >= config.max_positions}
    if any(each is not None for each in _entries(config)):
        return found
    if whole is None and len({(kind.heads, kind.numbers, kind.queries) for kind in wide}) > 1:
        return found
    alike = {kind: replace(kind, window=0) for kind in wide}
    alike = {kind: plainer for kind, plainer in alike.items() if whole in (None, plainer)}
    return [alike.get(kind, kind) if kind is not None else None for kind in found]


def _sources(config: DecoderConfig) -> list[int | None]:
    """Returns the layer that each layer attends to instead of keys and values of its own."""
    if not isinstance(config, FamilyConfig):
        return [None] * config.num_layers
    return [None if layer.attention is None else layer.attention.kv_from for layer in config.recipe.layers]


def _states(config: DecoderConfig) -> list[_Kind | None]:
    if not isinstance(config, FamilyConfig):
        return [None] * config.num_layers
    found: list[_Kind | None] = []
    for layer in config.recipe.layers:
        if layer.mixer is not None:
            found.append(_Kind(layer.mixer.heads, layer.mixer.numbers))
        else:
            made = None if layer.attention is None else layer.attention.shared or layer.attention.blocks
            # Every rank makes all entries.
            found.append(_Kind(0, made.numbers) if made is not None and made.numbers else None)
    return found


def _ngrams(config: DecoderConfig) -> list[_Kind | None]:
    """Returns the state of what is before each layer."""
    if not isinstance(config, FamilyConfig):
        return [None] * config.num_layers
    return [None if layer.ngrams is None else _Kind(0, layer.ngrams.numbers) for layer in config.recipe.layers]


def _entries(config: DecoderConfig) -> list[Entries | None]:
    """Returns the entries of each layer."""
    if not isinstance(config, FamilyConfig):
        return [None] * config.num_layers
    shared = [None if layer.attention is None else layer.attention.shared for layer in config.recipe.layers]
    return [None if each is None or each.entries is None else Entries(each.entries.every, each.kept) for each in shared]


def _beside(config: DecoderConfig) -> list[Entries | None]:
    """Returns the entries that each layer has beside its keys and values."""
    if not isinstance(config, FamilyConfig):
        return [None] * config.num_layers
    blocks = [None if layer.attention is None else layer.attention.blocks for layer in config.recipe.layers]
    return [None if each is None else Entries(each.every, each.channels) for each in blocks]


def check_kv_dtype(config: DecoderConfig, kv_dtype: KvCacheDtype) -> None:
    """Raises ConfigError if the keys and values of this model cannot be stored in the number format ``kv_dtype``."""
    if kv_dtype is KvCacheDtype.AUTO:
        return
    refused = f"--kv-cache-dtype {kv_dtype.value} is not for"
    if not isinstance(config, FamilyConfig):
        raise ConfigError(f"{refused} models that transformers computes; give --kv-cache-dtype auto")
    if config.latent is not None and config.latent.index is not None and config.latent.index.pool > 1:
        raise ConfigError(f"{refused} models that choose pools of tokens; give --kv-cache-dtype auto")
    if any(group.keep is Keep.LATEST for group in layer_groups(config).groups):
        raise ConfigError(f"{refused} models with recurrent states; give --kv-cache-dtype auto")
    if config.blocks is not None:
        raise ConfigError(f"{refused} models that attend to chosen blocks; give --kv-cache-dtype auto")


STATES_A_REQUEST = 2
"""The present state, and the next one, which a step writes."""
LEAST_STATES = 2 * STATES_A_REQUEST
"""Those of one request, and of another that a transfer brings or takes."""
CACHED_SHARE = 4
"""The prefix cache has one block of a bounded group for so many that requests need, at least."""
USUAL_WINDOWS = 4
"""Where memory is short, contexts of so many windows find whole contexts and windows full at the same time. Of shorter
ones fewer run at once than if all groups had as many blocks, and of longer ones more."""
CHECKPOINT_SHARE = 4
"""One of so many bytes that hold whole contexts is for states from which other requests can go on."""
MOST_EMPTY_BLOCKS = 2**18
"""A group without bytes has no more blocks than this, unless one context needs them."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What one group takes."""

    keep: Keep
    block_bytes: int
    window: int = 0
    """In tokens; 0 without a window."""


FP8_BYTES = 1
"""The bytes of a number in FP8. Each key or value has one byte more, its exponent."""


def row_bytes(numbers: int, item_bytes: int) -> int:
    """Returns the bytes of one stored key or value. ``item_bytes`` are those of one of its numbers."""
    return numbers * item_bytes + (1 if item_bytes == FP8_BYTES else 0)


def group_sizes(config: DecoderConfig, item_bytes: int, block_size: int) -> tuple[GroupSize, ...]:
    """Returns what the groups of a model take on all ranks together, if no two have the same heads.

    ``item_bytes`` are those of one number of a key.
    """
    found = []
    for group in layer_groups(config).groups:
        each = group.numbers * STATE_BYTES
        if group.keep is not Keep.LATEST:
            each = group.stored * block_size * row_bytes(group.channels(block_size), item_bytes)
        layers = group.stored_layers(block_size)
        found.append(GroupSize(group.keep, layers * max(1, group.heads) * each, group.window))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Load:
    """What a cache is made for."""

    requests: int
    """The places of a batch."""
    step_tokens: int
    context: int
    """The longest context that may be, in tokens."""
    asked: int = 0
    """The tokens of a context that has to fit; 0 if any will do."""


def group_blocks(groups: Sequence[GroupSize], block_size: int, nbytes: int, load: Load) -> tuple[int, ...]:
    """Returns how many blocks of each group ``nbytes`` hold. The first group, of whole contexts, gets what is left.

    Windows get no more than contexts of ``USUAL_WINDOWS`` windows each fill, and states get at most half, so that a
    batch which finds too little memory has fewer requests at a time.
    """
    whole, *bounded = groups
    if not bounded:
        return (nbytes // whole.block_bytes,)
    left = nbytes - len(bounded) * ALIGNMENT
    windows = [group for group in bounded if group.keep is Keep.WINDOW]
    states = [group for group in bounded if group.keep is Keep.LATEST]
    state_bytes = sum(group.block_bytes for group in states)
    window_bytes = sum(group.block_bytes for group in windows)
    asked = _blocks(load.asked, block_size)
    # A window that is as long as the context that is asked for has as many blocks.
    needed = asked * whole.block_bytes + sum(
        min(asked, _least_window(group, block_size, load)) * group.block_bytes for group in windows
    )
    num_states = 0
    if states:
        wanted = _with_cached(2 * STATES_A_REQUEST * load.requests)
        half = left // 2 if whole.block_bytes or windows else left
        num_states = max(LEAST_STATES, min(wanted, min(half, left - needed) // state_bytes))
        left -= num_states * state_bytes
    even = max(0, left) // ((whole.block_bytes + window_bytes) or 1)
    usual = _usual_requests(whole, windows, block_size, max(0, left), load)
    room = (left - asked * whole.block_bytes) // (window_bytes or 1)
    counts = [
        max(
            min(_least_window(group, block_size, load), even),
            min(_wanted_window(group, block_size, load), int(usual * _of_window(group, block_size, load)), even, room),
        )
        for group in windows
    ]
    left -= sum(count * group.block_bytes for count, group in zip(counts, windows, strict=True))
    if states:
        spare = max(0, min(left // CHECKPOINT_SHARE, left - max(asked, *counts, 0) * whole.block_bytes))
        more = (spare if whole.block_bytes else max(0, left)) // state_bytes
        # There are no more boundaries of blocks than blocks.
        num_states += min(more, load.requests * _blocks(load.context, block_size))
        left -= more * state_bytes
    # A cache that does not hold what one request needs holds no context.
    first = (
        max(0, left) // whole.block_bytes if whole.block_bytes else _empty_blocks(load, block_size) if left >= 0 else 0
    )
    # In a window with fewer blocks than the largest steps need, a step may be as long as the longest context.
    short = [
        count for count, group in zip(counts, windows, strict=True) if count < _least_window(group, block_size, load)
    ]
    first = min([first, *short])
    window_counts = iter(counts)
    return (first, *(next(window_counts) if group.keep is Keep.WINDOW else num_states for group in bounded))


def prompt_bytes(groups: Sequence[GroupSize], block_size: int) -> int:
    """Returns the most bytes that move with a prompt beside its whole contexts: the ends of windows, and states."""
    return sum(
        group.block_bytes * (1 if group.keep is Keep.LATEST else _blocks(group.window, block_size) + 1)
        for group in groups[1:]
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _of_window(group: GroupSize, block_size: int, load: Load) -> int:
    """Returns the most blocks of a window that one request has between two steps."""
    return min(group.window // block_size + 2, _blocks(load.context, block_size))


def _usual_requests(whole: GroupSize, windows: Sequence[GroupSize], block_size: int, nbytes: int, load: Load) -> float:
    """Returns how many requests ``nbytes`` hold whose contexts have ``USUAL_WINDOWS`` of the longest window."""
    most = max((group.window for group in windows), default=0)
    context = _blocks(min(USUAL_WINDOWS * most, load.context), block_size) * whole.block_bytes
    return nbytes / (context + sum(_of_window(group, block_size, load) * group.block_bytes for group in windows) or 1)


def _least_window(group: GroupSize, block_size: int, load: Load) -> int:
    """Returns the blocks with which one request can be computed in the largest steps."""
    most = _of_window(group, block_size, load) + _blocks(load.step_tokens, block_size) + 1
    return min(most, _blocks(load.context, block_size))


def _wanted_window(group: GroupSize, block_size: int, load: Load) -> int:
    requests = load.requests * _of_window(group, block_size, load) + _blocks(load.step_tokens, block_size) + 1
    return _with_cached(2 * requests)


def _with_cached(needed: int) -> int:
    return needed + -(-needed // CACHED_SHARE)


def _empty_blocks(load: Load, block_size: int) -> int:
    context = _blocks(load.context, block_size)
    return max(context, min(2 * load.requests * context, MOST_EMPTY_BLOCKS))
