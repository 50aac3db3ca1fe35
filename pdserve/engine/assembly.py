"""Puts one engine together out of its configuration."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from pdserve.config import EngineConfig, KvStaging, Overlap, Speculate, Switch
from pdserve.control.frame import Secrets
from pdserve.engine.api_channel import ApiChannel, WakeUp
from pdserve.engine.core_lending import Cores, open_cores
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.cache_size import block_counts, context_length, with_sizes
from pdserve.engine.kv_connector import KvConnector, open_connector, ucx_label
from pdserve.engine.kv_connector.transfer_memory import shared_memory
from pdserve.engine.launched_step import DraftRunner, StepRunner
from pdserve.engine.placement.latency_targets import LatencyTargets
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.runner_loading import kept_block_kernels, load_draft_model, load_runner, rank_backend
from pdserve.engine.sampling.grammar_opener import GrammarOpener
from pdserve.engine.sampling.pending_tokens import DeviceTokens
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.scheduling.output_collector import TimelineRecorder
from pdserve.engine.scheduling.request_limits import PromptRule, StopRule
from pdserve.engine.speculation.guesses import by_model
from pdserve.engine.speculation.speculation import MOST_READ
from pdserve.engine.step_loop import StepLoop
from pdserve.engine.tp.tp_ranks import Ranks
from pdserve.engine.tp.tp_runner import TpRunner
from pdserve.grammars.compiling import load_vocabulary
from pdserve.liveness import LifeBoard, step_loop
from pdserve.machine.memory import give_freed_memory_back
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.checkpoint.fingerprint import fingerprint
from pdserve.models.checkpoint.gguf.file import forget_gguf, is_gguf
from pdserve.models.layer_groups import check_kv_dtype, prompt_bytes
from pdserve.models.rank_cache import cache_place, compared_dtype, compared_groups, rank_sizes
from pdserve.models.runner import CudaGraphs, DraftRow, ModelRunner, StepRow
from pdserve.models.tp.shares import TpGroup
from pdserve.wire.cache_groups import GroupBlocks, Keep
from pdserve.wire.discovery import GroupCapacity
from pdserve.wire.engine import Met, Ready
from pdserve.wire.rank import Loaded, LoadModel
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.transfer import EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION

READING_TOLD_S = 10.0
"""The engine says no oftener than this that it still reads weights for their digests."""
CPU_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of an engine that its process needs.

    The caller sends ``ready``, and closes ``connector`` and ``cores``.
    """

    loop: StepLoop
    connector: KvConnector
    cores: Cores
    ready: Ready


def assemble(
    config: EngineConfig,
    api: ApiChannel,
    wake_up: WakeUp,
    progress: Callable[[str], None],
    ranks: Ranks | None,
    tp: TpGroup,
    device: torch.device,
    life: LifeBoard,
    around: Callable[[StepRunner], StepRunner] | None = None,
) -> Engine:
    """Loads the model, warms it up and opens the transfers. ``progress`` is called with the name of each stage.

    ``tp`` is the group of all ranks, and ``device`` is rank 0's. The engine's loops show ``life``.
    ``around`` puts another runner around the model's.
    Raises ModelError, ConfigError, RankLost or TransferError if something does not fit.
    """
    model_dir = Path(config.model_dir)
    decoder = read_decoder_config(model_dir)
    block_size = config.cache.block_size
    dtype = config.model.dtype
    kv_dtype = config.cache.kv_cache_dtype
    check_kv_dtype(decoder, kv_dtype)
    sizes = rank_sizes(decoder, dtype, block_size, tp, kv_dtype)
    config = with_sizes(config, decoder, sizes, tp.size, device)
    counts = block_counts(config, decoder, sizes, tp.size, device)
    groups, cache_bytes = cache_place(decoder, dtype, block_size, counts, tp, kv_dtype)
    num_blocks, kept_bytes = counts[0], sizes[0].block_bytes * tp.size
    beside = cache_bytes * tp.size - num_blocks * kept_bytes
    max_model_len = context_length(
        config.cache, config.model.max_model_len, decoder.max_positions, num_blocks, kept_bytes, beside
    )
    progress("preparing kernels")
    backend = rank_backend(config, device)
    cores = open_cores(config, backend.kernels)
    block_kernels = kept_block_kernels(config, backend)
    cache_dir = Path(config.cache_dir)
    load_own = partial(load_vocabulary, model_dir, sorted(decoder.eos_token_ids), cache_dir)
    grammars = GrammarOpener(load_own, wake_up.set)
    if not is_gguf(model_dir):
        # Of a GGUF file transformers may have to make the tokenizer first, which takes longer than all else here.
        grammars.prepare()
    loading = _LoadingStage(progress)
    # It reads every byte of the weights where nobody has yet. Ranks find the digests.
    digest = fingerprint(
        model_dir,
        cache_dir,
        in_blocks=block_kernels is not None,
        long_contexts=decoder.turns_for_long_contexts(max_model_len),
        goes_on=loading.goes_on,
    )
    spec = _engine_spec(config, decoder, tp.size, digest)
    drafts = by_model(config.scheduler, decoder.has_draft_layer)
    if ranks is not None:
        ranks.tell(LoadModel(num_blocks, max_model_len, counts[1:], drafts))
    shared = None
    if config.has_peers:
        shared = shared_memory(config.transfer, config.cache.kv_cache_mib, device, cache_bytes)
    kv_memory = None if shared is None else shared.bytes
    own = load_runner(
        config, decoder, counts, max_model_len, tp, backend, kv_memory, block_kernels, loading.tell, drafts=drafts
    )
    runner: ModelRunner | TpRunner = own
    if ranks is not None:
        ranks.wait_for(Loaded)
        runner = TpRunner(own, ranks, tp)
    draft_model = None
    if config.scheduler.used_draft_model:
        draft_model = load_draft_model(config, decoder, max_model_len, backend, _LoadingStage(progress).tell)
    forget_gguf()
    progress("warming up")
    tokens = warm_up_tokens(config.scheduler.max_num_batched_tokens, max_model_len, device)
    warm_up(runner, tokens, block_size, groups[1:], runner if drafts else None)
    if draft_model is not None:
        warm_up(draft_model.runner, min(tokens, MOST_READ, draft_model.max_positions - 1), block_size)
    if backend.graph_kernels is not None and config.model.cuda_graphs is Switch.ON:
        progress("recording decode steps")
        linked = config.scheduler.speculates is not Speculate.OFF
        runner.capture_decode(backend.graph_kernels, config.scheduler.most_rows, CudaGraphs(), linked=linked)
        if draft_model is not None:
            draft_model.runner.capture_decode(backend.graph_kernels, config.scheduler.max_num_seqs, CudaGraphs())
    if device.type == "cuda":
        warm_up_sampling(decoder.vocab_size, config.scheduler.most_rows, device)
    if isinstance(runner, TpRunner):
        runner.warmed_up()
    blocks = BlockManager(
        num_blocks,
        block_size,
        prefix_cache=config.cache.prefix_cache is Switch.ON,
        bounded=groups[1:],
        block_bytes=groups[0].block_bytes,
    )
    stop = StopRule(decoder.eos_token_ids, max_model_len)
    prompts = PromptRule(decoder.vocab_size, max_model_len)
    bytes_per_token, bytes_per_prompt = kept_bytes / block_size, prompt_bytes(sizes, block_size) * tp.size
    step_cost = StepCost()
    targets = LatencyTargets(config.targets, step_cost, config.role, config.scheduler.batching)
    placement = Placement(
        step_cost, config.transfer, config.scheduler, block_size, bytes_per_token, targets, bytes_per_prompt
    )
    secrets = Secrets(config.secret)
    connector, control = open_connector(
        config,
        spec=spec,
        kv_cache=own.cache.memory if spec.groups else own.kv_cache,
        shared=shared,
        blocks=blocks,
        prompts=prompts,
        placement=placement,
        ranks=ranks,
        secrets=secrets,
        wake=wake_up.set,
        life=life,
        groups=groups if spec.groups else (),
        met=lambda number: api.send(Met(number)),
    )
    ahead = own if overlaps(config, device) and not own.cache.states else None
    loop = StepLoop(
        api=api,
        wake_up=wake_up,
        runner=runner if around is None else around(runner),
        blocks=blocks,
        connector=connector,
        config=config.scheduler,
        stop=stop,
        prompts=prompts,
        ahead_runner=ahead,
        ahead_drafter=ahead if drafts else None,
        drafter=runner if drafts else None,
        draft_model=draft_model,
        placement=placement,
        renew=secrets.renew,
        grammars=grammars,
        cores=cores,
        give_back=give_freed_memory_back,
        recorder=TimelineRecorder() if config.records else None,
        life=life.sign(step_loop(0)),
        ranks_s=0.0 if ranks is None else config.parallel.timeout_ms / 1000,
    )
    ready = Ready(
        control=control,
        fingerprint=_pairing_fingerprint(spec),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_running=config.scheduler.max_num_seqs,
        vocab_size=decoder.vocab_size,
        kernels=backend.kernels.name if tp.size == 1 else f"{backend.kernels.name}, {tp.size} ranks",
        process_ids=_process_ids(ranks),
        ucx=ucx_label(config),
        device=_device_words(device, tp.size),
        step_tokens=config.scheduler.max_num_batched_tokens,
        kv_bytes=cache_bytes * tp.size,
        cache_groups=_group_capacities(groups, tp.size),
    )
    return Engine(loop, connector, cores, ready)


def _group_capacities(groups: Sequence[GroupBlocks], ranks: int) -> tuple[GroupCapacity, ...]:
    """Returns what a node says of its cache groups; nothing if there is one. ``groups`` are those of one rank."""
    if len(groups) == 1:
        return ()
    return tuple(
        GroupCapacity(group.spec.name, group.spec.keep, group.count, group.block_bytes * ranks, group.spec.window)
        for group in groups
    )


def _device_words(device: torch.device, ranks: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads() * ranks
    return f"CPU, {threads} core{'s' if threads > 1 else ''}"


def _process_ids(ranks: Ranks | None) -> dict[str, int]:
    others = [] if ranks is None else ranks.pids
    return {"engine": os.getpid(), **{f"rank-{number}": pid for number, pid in enumerate(others, start=1)}}


def overlaps(config: EngineConfig, device: torch.device) -> bool:
    """Returns whether decode steps are launched ahead.

    They are only where no transfer writes to the KV cache by itself and no other rank has to be told. Blocks that a
    transfer brings through host memory are copied to the cache behind all steps that were launched before. The node's
    role makes no difference, because it may change.
    """
    staging = config.transfer.staging
    staged = staging is KvStaging.ON or (staging is KvStaging.AUTO and device.type == "cuda")
    alone = config.parallel.tensor_parallel_size == 1 and (staged or not config.has_peers)
    match config.scheduler.overlap:
        case Overlap.AUTO:
            return alone and device.type == "cuda"
        case Overlap.ON:
            return alone
        case Overlap.OFF:
            return False


def warm_up_tokens(max_num_batched_tokens: int, max_model_len: int, device: torch.device) -> int:
    """Returns the length of the prompt that warms an engine up: as long as a step allows, because a GPU's libraries
    choose their code by it and take memory for it.

    A CPU's do neither. After 16 tokens a step of 256 was measured to take what it takes later, 0.37 s on one core.
    """
    most = min(max_num_batched_tokens, max_model_len - 1)
    return min(most, CPU_WARM_UP_TOKENS) if device.type == "cpu" else most


class _LoadingStage:
    """Tells how much of the weights is loaded: every tenth, but not more often than once a second.

    Before, they are read for their digests. That has to show, too: an engine that says nothing for long is ended.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._told_s = time.monotonic()
        self._told = 0
        self._progress("loading weights")

    def goes_on(self) -> None:
        if time.monotonic() - self._told_s >= READING_TOLD_S:
            self._told_s = time.monotonic()
            self._progress("loading weights")

    def tell(self, share: float) -> None:
        tenth = int(share * 10)
        if tenth > self._told and time.monotonic() - self._told_s >= 1.0:
            self._told, self._told_s = tenth, time.monotonic()
            self._progress(f"loading weights, {tenth * 10} %")


def warm_up(
    runner: StepRunner,
    tokens: int,
    block_size: int,
    bounded: Sequence[GroupBlocks] = (),
    drafter: DraftRunner | None = None,
) -> None:
    """Computes a chunk of a prompt, then a token: every library allocates and chooses its code before any request.

    ``bounded`` are the groups of the cache that do not keep whole contexts. ``drafter`` drafts behind both.
    """
    blocks = range(-(-(tokens + 1) // block_size))
    chunk = StepRow([0] * tokens, 0, blocks, True, others=[_table(group, len(blocks), -1) for group in bounded])
    token = StepRow([0], tokens, blocks, True, others=[_table(group, len(blocks), 0) for group in bounded])
    for row in (chunk, token):
        runner.run([row])
        if drafter is not None:
            drafter.draft([DraftRow(0, row.token_ids, True)], 2)
    runner.clear([*blocks, *(block for table in token.others for block in table)])


def _table(group: GroupBlocks, blocks: int, state: int) -> Sequence[int]:
    """Returns the table of the first ``blocks`` of a group, or of its states: the first follows ``state``, if any."""
    if group.spec.keep is Keep.LATEST:
        return (group.first + state, group.first + state + 1) if state >= 0 else (-1, group.first)
    return group.ids[:blocks]


def warm_up_sampling(vocab_size: int, rows: int, device: torch.device) -> None:
    """Samples a full batch in the way that takes most memory: a GPU without room for that does not begin to serve."""
    row = SamplingRow(SamplingParams(max_tokens=1, seed=0, top_p=0.999, logprobs=1), [0], 1)
    logits = torch.zeros(rows, vocab_size, device=device)
    DeviceTokens(logits, [row] * rows, range(rows), frozenset()).read()


def _engine_spec(config: EngineConfig, decoder: DecoderConfig, tp_size: int, digest: str) -> EngineSpec:
    """Returns what two engines compare before they exchange KV blocks."""
    return EngineSpec(
        protocol=PROTOCOL_VERSION,
        oldest_protocol=OLDEST_PROTOCOL,
        fingerprint=digest,
        dtype=compared_dtype(config.model.dtype, config.cache.kv_cache_dtype),
        block_size=config.cache.block_size,
        num_layers=decoder.cached_layers,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        tp_size=tp_size,
        groups=compared_groups(decoder, config.model.dtype, config.cache.block_size, config.cache.kv_cache_dtype),
    )


def _pairing_fingerprint(spec: EngineSpec) -> str:
    """Returns a hash of all of the spec but the number of ranks: engines with the same one can exchange KV blocks."""
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(spec, tp_size=1))).hexdigest()
