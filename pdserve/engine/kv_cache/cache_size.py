"""How many bytes the KV cache of an engine has, and the other sizes that depend on what its device has at the start.

A GPU's memory takes weights, KV cache, and a workspace for computing. The workspace is counted from what is in memory
at the same time, so that a step of any size that the settings allow has its memory. The sum is that of rank 0, which
alone has all logits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pdserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.engine.sampling.sampling_row import sampling_bytes
from pdserve.engine.speculation.guesses import by_model
from pdserve.engine.speculation.speculation import MOST_READ
from pdserve.errors import ConfigError
from pdserve.machine.memory import MIB, available_memory
from pdserve.models.block_plan import BlockLoad, chosen_bytes, head_block_bytes
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FallbackConfig, FamilyConfig
from pdserve.models.checkpoint.weight_form import draft_model_size, gpu_weight_bytes, model_size_of, weight_bytes
from pdserve.models.latent_plan import choosing_bytes, expanded_bytes
from pdserve.models.layer_groups import GroupSize, Load, group_blocks
from pdserve.models.rank_cache import TORCH_DTYPES
from pdserve.models.recipe import (
    AltUpRecipe,
    AttentionRecipe,
    FeedForwardRecipe,
    GatedStreamsRecipe,
    LatentRecipe,
    LayerRecipe,
    MlpBesideExperts,
    MlpRecipe,
    NgramRecipe,
    SharedKvRecipe,
)
from pdserve.models.runner import SCORED_LOGITS
from pdserve.models.shared_plan import SharedLoad, shared_bytes
from pdserve.models.sizes import (
    GPU_ONLY,
    MOST_PLACES,
    cpu_cache,
    cpu_scheduler,
    fitting_context,
    gpu_budget,
    gpu_scheduler,
    gpu_share,
)
from pdserve.models.tp.shares import shares_out_experts
from pdserve.wire.cache_groups import Keep
from pdserve_kernels.feed_forward import SILU_BOUNDS, Activation

log = logging.getLogger(__name__)

LIBRARY_BYTES = 2**30
"""What libraries, compiled kernels, nodes of recorded steps and the numbers of a packed weight take that are written
down for a product, and what torch's allocator cannot use."""

SCORING_BYTES_PER_LOGIT = 32
"""What is computed of logits of a prompt's tokens takes at most this."""

_INDEX_BYTES = 8
_FP32_BYTES = 4
_INNER_NUMBERS = {Activation.SILU: 3, Activation.GELU_TANH: 3, Activation.XIELU: 7}
_INNER_NUMBERS |= dict.fromkeys(SILU_BOUNDS.values(), 5)
"""How many numbers for each channel of a feed-forward part are there at once. With others, it is 4."""


def workspace_bytes(
    decoder: DecoderConfig, scheduler: SchedulerConfig, dtype: torch.dtype, ranks: int, block_bytes: int
) -> int:
    """Returns the bytes that stay free for computing. Recorded steps have memory of their own, which stays theirs.

    Before a step, a block of ``block_bytes`` may be copied for each of its requests.
    """
    rows, tokens = scheduler.most_rows, scheduler.max_num_batched_tokens
    recorded = rows * decoder.vocab_size * _FP32_BYTES + step_bytes(decoder, dtype, ranks, rows, rows)
    drafts = by_model(scheduler, decoder.has_draft_layer)
    drafting = draft_bytes(decoder, dtype, rows + tokens) if drafts else 0
    scored = max(SCORED_LOGITS, decoder.vocab_size)
    scoring = scored * SCORING_BYTES_PER_LOGIT + logits_bytes(1, scored, dtype, ranks)
    sampling = sampling_bytes(rows, decoder.vocab_size)
    beside = max(scoring, sampling, rows * block_bytes)
    if isinstance(decoder, FamilyConfig) and decoder.latent is not None:
        beside += expanded_bytes(decoder.latent, decoder.max_positions, dtype.itemsize)
        beside += choosing_bytes(decoder.latent, max(rows, tokens), decoder.max_positions)
        beside += _latent_weights(decoder, decoder.latent, ranks) * dtype.itemsize
    if isinstance(decoder, FamilyConfig):
        if decoder.recipe.precise_head and not decoder.recipe.tied:
            beside += decoder.vocab_size * decoder.hidden_size * (_FP32_BYTES - dtype.itemsize) // ranks
        beside += _gathering_bytes(decoder, dtype, ranks, rows, max(rows, tokens))
        beside += _whole_weights(decoder) * (ranks - 1) // ranks * dtype.itemsize
    return LIBRARY_BYTES + recorded + step_bytes(decoder, dtype, ranks, tokens, rows) + drafting + beside


def _gathering_bytes(decoder: FamilyConfig, dtype: torch.dtype, ranks: int, rows: int, tokens: int) -> int:
    """Returns the most bytes that what is gathered for one layer's attention takes beside activations."""
    most = 0
    for part in decoder.recipe.attention:
        if part.blocks is not None:
            heads, kv_heads = decoder.heads // ranks, -(-decoder.kv_heads // ranks)
            load = BlockLoad(heads, kv_heads, decoder.head_dim, tokens, decoder.max_positions)
            most = max(most, chosen_bytes(part.blocks, dtype.itemsize, load))
        if part.shared is not None:
            sizes = (decoder.heads // ranks, decoder.head_dim, part.window or 0, rows, tokens, decoder.max_positions)
            most = max(most, shared_bytes(part.shared, dtype.itemsize, SharedLoad(*sizes)))
    if decoder.head_blocks is not None:
        kv_heads = -(-decoder.kv_heads // ranks)
        sizes = (kv_heads, decoder.heads // ranks, tokens, rows, decoder.max_positions, dtype.itemsize)
        most = max(most, head_block_bytes(decoder.head_blocks, *sizes))
    return most


def _whole_weights(decoder: FamilyConfig) -> int:
    """Returns how many weights each rank has as a whole of products of residuals, index keys of blocks, and n-grams."""
    total, hidden = 0, decoder.hidden_size
    streams = decoder.recipe.layers[0].streams
    if isinstance(streams, AltUpRecipe):
        total += 2 * (streams.count - 1) * hidden * hidden
    for layer in decoder.recipe.layers:
        if isinstance(layer.streams, GatedStreamsRecipe):
            # Before both parts: to the numbers that gates are made of and to weights, and to gates.
            total += 2 * layer.streams.count * hidden * (2 * layer.streams.rank + layer.streams.count)
        if layer.beside is not None:
            total += 2 * layer.beside.rank * hidden
        if layer.attention is not None and layer.attention.blocks is not None:
            total += hidden * (layer.attention.blocks.heads + 1) * layer.attention.blocks.channels
        if layer.ngrams is not None:
            total += len(layer.ngrams.sizes) * layer.ngrams.channels * (layer.ngrams.stream_channels + hidden)
    return total


def _latent_weights(decoder: FamilyConfig, latent: LatentRecipe, ranks: int) -> int:
    """Returns how many weights of latents a rank has beside its share of all: those it has twice, or as a whole."""
    twice = decoder.heads * latent.plain * latent.rank // ranks
    whole = decoder.hidden_size * (latent.query_rank + latent.channels)
    if latent.index is not None:
        queries = (latent.query_rank or decoder.hidden_size) * latent.index.heads * latent.index.channels
        # Those of heads are in fp32.
        whole += queries + decoder.hidden_size * (latent.index.kept + 2 * latent.index.heads)
    whole = whole * (ranks - 1) // ranks
    return len(decoder.recipe.attention) * (twice + whole)


def step_bytes(decoder: DecoderConfig, dtype: torch.dtype, ranks: int, tokens: int, rows: int) -> int:
    """Returns the most bytes that a step of ``tokens`` has in memory at once, the logits of ``rows`` tokens included.

    The logits of the step before are there until they are sampled.
    """
    logits = logits_bytes(rows, decoder.vocab_size, dtype, ranks)
    return tokens * _token_bytes(decoder, dtype, ranks) + logits + rows * decoder.vocab_size * _FP32_BYTES


def draft_model_bytes(config: EngineConfig, device: torch.device) -> int:
    """Returns the bytes of rank 0's draft model: weights, cache, and on a GPU what a step of it takes. 0 without one.

    Raises ModelError if its files cannot be read.
    """
    if not config.scheduler.used_draft_model:
        return 0
    path = Path(config.scheduler.used_draft_model)
    decoder = read_decoder_config(path)
    held = draft_model_size(path, decoder, config.model, config.cpu.kernels, config.cache.block_size)
    if device.type != "cuda":
        return held.total
    rows = config.scheduler.max_num_seqs or MOST_PLACES
    step = step_bytes(decoder, TORCH_DTYPES[config.model.dtype], 1, MOST_READ + rows, rows)
    return held.cache + gpu_weight_bytes(path, config.model) + step


def draft_bytes(decoder: DecoderConfig, dtype: torch.dtype, tokens: int) -> int:
    """Returns the most bytes that drafting behind a step of ``tokens`` takes beside what the step itself took.

    The hidden states of the step stay, as they are and normalised, and lie beside the embeddings of the next tokens.
    """
    return 4 * tokens * decoder.hidden_size * dtype.itemsize


def logits_bytes(rows: int, vocab_size: int, dtype: torch.dtype, ranks: int) -> int:
    """Returns the bytes of logits as the head gives them, those that ranks exchange, and as fp32."""
    parts = 1 if ranks == 1 else 3
    return rows * (vocab_size + ranks) * (parts * dtype.itemsize + _FP32_BYTES)


def _token_bytes(decoder: DecoderConfig, dtype: torch.dtype, ranks: int) -> int:
    """Returns the most bytes that one token's activations have at once, in the widest part of a layer."""
    if isinstance(decoder, FamilyConfig):
        layers = set(decoder.recipe.layers)
        feeds = [part for layer in layers for part in layer.feeding]
        mixing = [_mixing_numbers(decoder, layer, ranks) for layer in layers]
        widest = max([*mixing, *(_feed_numbers(decoder, part, ranks) for part in feeds)])
        head_dim = max((decoder.of_layer(part).head_dim for part in decoder.recipe.attention), default=0)
        # The inputs of all layers' ends are there while the layers are computed, and while they are made, in parts.
        inputs = decoder.recipe.per_layer
        held = 0 if inputs is None else 4 * inputs.channels * decoder.num_layers
        # Latents that later layers have, too, are there while these are computed.
        latents = [part.latent for part in decoder.recipe.attention if part.latent is not None]
        sources = {latent.key_from for latent in latents} - {None}
        held += len(sources) * latents[0].channels if sources else 0
        # What is computed beside attention is given a norm's output, which is there until then.
        held += 2 * decoder.hidden_size if any(layer.beside is not None for layer in layers) else 0
        # What a shortcut gives is there during the next layer.
        held += decoder.hidden_size if any(layer.shortcut is not None for layer in layers) else 0
        own = max((_routing_bytes(part) for part in feeds), default=0)
        streams = decoder.recipe.layers[0].streams
        if streams is not None:
            # All residuals are there beside a part; before and behind it they are mixed in fp32.
            residuals = streams.count * decoder.hidden_size
            ngrams = max(
                (_ngram_numbers(layer.ngrams, decoder.hidden_size) for layer in layers if layer.ngrams), default=0
            )
            widest, held = max(widest, 9 * residuals, ngrams), held + 2 * residuals
    else:
        widest, own, head_dim, held = _attention_numbers(decoder, None, ranks), 0, decoder.head_dim, 0
        if isinstance(decoder, FallbackConfig):
            widest = max(widest, 4 * decoder.channels)
    # The residual, what is added to it, both after a norm, the results of both parts, and the angles of the positions.
    return (widest + 6 * decoder.hidden_size + 4 * head_dim + held) * dtype.itemsize + own + 4 * _INDEX_BYTES


def _attention_numbers(decoder: DecoderConfig, recipe: AttentionRecipe | None, ranks: int) -> int:
    """Returns how many numbers of the model's kind one token's queries, keys, values and results are at once."""
    # Ranks may share KV heads, so each holds at least one.
    heads, kv_heads = -(-decoder.heads // ranks), -(-decoder.kv_heads // ranks)
    if recipe is not None and recipe.latent is not None:
        latent = recipe.latent
        own = 2 * (latent.plain + latent.turned) + 3 * latent.channels + 2 * latent.rank + 2 * latent.value
        # Of gated heads, each one's gate is there once for each channel, beside its values, and then the products.
        own += 0 if recipe.gate is None else 3 * latent.value
        # So are queries that grow, as they come and multiplied.
        own += 0 if latent.head_scales is None else latent.plain + latent.turned
        own = heads * own + 3 * latent.channels + (4 if latent.query_pair else 2) * latent.query_rank
        if latent.index is None:
            return own
        # Its keys, its queries as they come, turned and together, and in fp32 its input and the weights of heads.
        index = latent.index
        own += decoder.hidden_size if index.query_norm else 0
        return own + 5 * index.kept + 4 * index.heads * (index.channels + 1) + 2 * decoder.hidden_size
    if recipe is not None and recipe.shared is not None:
        return _shared_numbers(recipe.shared, heads, decoder.head_dim)
    if recipe is not None and recipe.head_blocks is not None:
        # Queries and keys as they come, normalised, joined and turned, queries with zeros, and results; what is stored.
        chosen = 0 if recipe.head_blocks.index is None else 8 * (kv_heads + 1) * recipe.head_blocks.index.channels
        return (9 * heads + 12 * kv_heads) * decoder.head_dim + chosen
    # A gate is there as it is, and once more as the factor of the result.
    gates = 2 * heads if recipe is not None and recipe.gate is not None else 0
    if recipe is not None and recipe.blocks is not None:
        # Queries and keys take steps of their own, and those that choose stand beside, as they come and turned.
        chosen_by = 6 * (recipe.blocks.heads + 1) * recipe.blocks.channels
        return (8 * heads + 6 * kv_heads + gates) * decoder.head_dim + chosen_by
    if recipe is None or not recipe.norms_apart:
        return (3 * heads + 2 * kv_heads + gates) * decoder.head_dim
    # Norms take steps of their own, across ranks in fp32, and the rotation is then one, too.
    return (7 * heads + 5 * kv_heads + gates) * decoder.head_dim


def _ngram_numbers(ngrams: NgramRecipe, hidden_size: int) -> int:
    """Returns how many numbers of the model's kind one token has at once in what n-grams add to the residuals."""
    # Vectors and what they lead to; keys and queries, in fp32 as they are, normalised and weighed; and their product.
    vectors = 2 * len(ngrams.sizes) * (ngrams.channels + 8) + hidden_size
    return vectors + 9 * ngrams.stream_channels


def _shared_numbers(shared: SharedKvRecipe, heads: int, channels: int) -> int:
    """Returns what ``_attention_numbers`` does for attention to one vector of a token."""
    # Vectors and gates of entries as they come, in fp32, and of one part; and for each token of a short entry its sums.
    made = 0 if shared.entries is None else 14 * shared.entries.parts * shared.kept
    index = 0 if shared.index is None else 5 * shared.index.heads * shared.index.entries.channels
    # Queries as they come, normalised and turned, or turned and the result, which is turned back and grouped.
    return heads * 4 * channels + 2 * (shared.query_rank + 2 * channels) + made + index


def _mixing_numbers(decoder: FamilyConfig, layer: LayerRecipe, ranks: int) -> int:
    """Returns how many numbers of the model's kind one token has at once in a layer's attention and mixer."""
    attention = 0
    if layer.attention is not None:
        attention = _attention_numbers(decoder.of_layer(layer.attention), layer.attention, ranks)
    mixer = 0 if layer.mixer is None else -(-layer.mixer.token_numbers // (ranks if layer.mixer.heads else 1))
    if not attention or not mixer:
        return attention + mixer
    # The result of one is there while the other is computed.
    return max(attention, mixer) + decoder.hidden_size


def _feed_numbers(decoder: DecoderConfig, recipe: FeedForwardRecipe, ranks: int) -> int:
    """Returns how many numbers of the model's kind one token's feed-forward part has at once, but for its result."""
    if isinstance(recipe, MlpBesideExperts):
        # The result of one is there while the other is computed, from what its norms made of the residual.
        experts = _feed_numbers(decoder, recipe.experts, ranks) + 3 * decoder.hidden_size
        return max(_feed_numbers(decoder, recipe.mlp, ranks) + decoder.hidden_size, experts)
    if isinstance(recipe, MlpRecipe):
        # A bound of gates is found in fp32.
        bounding = 6 if recipe.sparsity else 0
        return (_INNER_NUMBERS.get(recipe.activation, 4) + bounding) * -(-recipe.channels // ranks)
    # What each chosen expert makes of a token is there, in between and in the end.
    channels = recipe.expert.channels
    shared_out = shares_out_experts(ranks, recipe.count, channels)
    routed = recipe.chosen * ((channels if shared_out else -(-channels // ranks)) + decoder.hidden_size)
    if recipe.shared is None:
        return routed
    # The result of the shared expert is there beside, and once more while a gate weighs it.
    shared = _feed_numbers(decoder, recipe.shared, ranks) + 2 * decoder.hidden_size
    return max(routed + decoder.hidden_size, shared)


def _routing_bytes(recipe: FeedForwardRecipe) -> int:
    """Returns the bytes of a router's outputs, of the chosen experts and weights, and of the tiles of sorted rows."""
    if isinstance(recipe, MlpRecipe):
        return 0
    if isinstance(recipe, MlpBesideExperts):
        return _routing_bytes(recipe.experts)
    return recipe.count * _FP32_BYTES + recipe.chosen * 6 * _FP32_BYTES


def cache_bytes(
    cache: CacheConfig, ranks: int, device: torch.device, folder: Path, model: ModelConfig, workspace: int
) -> int:
    """Returns the bytes of the cache of one of the ``ranks``. It needs ``workspace`` for computing on a GPU.

    With ``--gpu-memory-utilization``, the memory of this rank's GPU counts for all. Raises ConfigError if that is given
    for a CPU, or leaves no room.
    """
    share = cache.gpu_memory_utilization
    if not share:
        return cache.kv_cache_mib * MIB // ranks
    if device.type != "cuda":
        raise ConfigError(GPU_ONLY)
    free, total = torch.cuda.mem_get_info(device)
    weights = gpu_weight_bytes(folder, model) // ranks
    return gpu_cache_bytes(share, total, free, weights, workspace)


def block_counts(
    config: EngineConfig, decoder: DecoderConfig, groups: Sequence[GroupSize], ranks: int, device: torch.device
) -> tuple[int, ...]:
    """Returns how many blocks each group of the cache has on every rank.

    ``config`` has all sizes, and ``groups`` are those of one rank. Raises ConfigError as ``cache_bytes`` does.
    """
    dtype, scheduler = TORCH_DTYPES[config.model.dtype], config.scheduler
    of_tokens = sum(group.block_bytes for group in groups if group.keep is not Keep.LATEST)
    workspace = workspace_bytes(decoder, scheduler, dtype, ranks, of_tokens) + draft_model_bytes(config, device)
    nbytes = cache_bytes(config.cache, ranks, device, Path(config.model_dir), config.model, workspace)
    asked = config.model.max_model_len
    context = asked or decoder.max_positions
    load = Load(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, context, asked)
    return group_blocks(groups, config.cache.block_size, nbytes, load)


def gpu_cache_bytes(share: float, total: int, free: int, weights: int, workspace: int) -> int:
    """Returns the bytes that the KV cache may take on a GPU of which the engine takes ``share``.

    ``total`` and ``free`` are the GPU's memory before the engine has loaded its ``weights``; ``workspace`` stays free
    for computing. Raises ConfigError if nothing is left.
    """
    left = gpu_budget(share, total, free) - weights - workspace
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g}: nothing is left for the KV cache. The GPU has {total // MIB} MiB, of "
            f"which {(total - free) // MIB} are in use; the weights take {weights // MIB}, and "
            f"{workspace // MIB} stay free for computing (less with lower --max-num-batched-tokens or --max-num-seqs)"
        )
    return left


def context_length(
    cache: CacheConfig, asked: int, max_positions: int, num_blocks: int, block_bytes: int, beside: int = 0
) -> int:
    """Returns how many tokens a prompt and its output may have together, and warns if that is less than the model's.

    Takes what ``fitting_context`` takes, and raises ConfigError as it does.
    """
    context, cut = fitting_context(cache, asked, max_positions, num_blocks, block_bytes, beside)
    if cut:
        log.warning("%s", cut)
    return context


def with_sizes(
    config: EngineConfig, decoder: DecoderConfig, groups: Sequence[GroupSize], ranks: int, device: torch.device
) -> EngineConfig:
    """Returns ``config`` with a KV cache, step tokens and places for ``device``.

    ``groups`` are those of one rank's cache. Raises ConfigError if the memory is too small for what is asked for.
    """
    if device.type == "cuda":
        return _for_gpu(config, decoder, groups, ranks, device)
    model = model_size_of(
        weight_bytes(Path(config.model_dir), config.model, config.cpu.kernels),
        [replace(group, block_bytes=group.block_bytes * ranks) for group in groups],
        config.cache.block_size,
        decoder.max_positions,
        draft_model_bytes(config, device),
    )
    memory = config.cache.node_memory_mib * MIB or available_memory()
    cache = cpu_cache(model, config.cache, config.model.max_model_len, memory, ranks)
    if cache.node_memory_mib:
        # Who gives the sizes for a CPU as well as for a GPU means those of the device that is here.
        cache = replace(cache, gpu_memory_utilization=0.0)
    cores = torch.get_num_threads() * ranks
    return replace(
        config, cache=cache, scheduler=cpu_scheduler(model, config.scheduler, cache.kv_cache_mib * MIB, cores)
    )


def _for_gpu(
    config: EngineConfig, decoder: DecoderConfig, groups: Sequence[GroupSize], ranks: int, device: torch.device
) -> EngineConfig:
    share = gpu_share(config.cache)
    free, total = torch.cuda.mem_get_info(device)
    weights = gpu_weight_bytes(Path(config.model_dir), config.model) // ranks + draft_model_bytes(config, device)
    given = config.cache.kv_cache_mib * MIB // ranks
    of_tokens = sum(group.block_bytes for group in groups if group.keep is not Keep.LATEST)
    of_states = sum(group.block_bytes for group in groups if group.keep is Keep.LATEST)

    def left_after(scheduler: SchedulerConfig) -> int:
        """Returns the bytes of the KV cache with steps of this size."""
        workspace = workspace_bytes(decoder, scheduler, TORCH_DTYPES[config.model.dtype], ranks, of_tokens)
        if not share:
            return min(given, free - weights - workspace)
        return gpu_budget(share, total, free) - weights - workspace

    scheduler = gpu_scheduler(config.scheduler, of_tokens // config.cache.block_size, left_after, of_states)
    return replace(config, cache=replace(config.cache, gpu_memory_utilization=share), scheduler=scheduler)
