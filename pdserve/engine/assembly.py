"""Puts one engine together out of its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import EngineConfig, Switch
from pdserve.engine.api_channel import ApiChannel
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.kernel_set import cpu_kernels
from pdserve.engine.kv_connector import KvConnector, open_connector
from pdserve.engine.prompt_rule import PromptRule
from pdserve.engine.step_loop import StepLoop, WakeUp
from pdserve.engine.stop_rule import StopRule
from pdserve.errors import ConfigError
from pdserve.models.decoder_config import DecoderConfig, read_decoder_config
from pdserve.models.runner import ModelRunner, kv_layout
from pdserve.models.step_batch import StepRow
from pdserve.models.weights import fingerprint
from pdserve.wire.transfer import PROTOCOL_VERSION, EngineSpec

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine's parts, as its process needs them. The caller closes ``connector``."""

    loop: StepLoop
    connector: KvConnector
    control: str
    spec: EngineSpec
    num_blocks: int
    max_model_len: int
    vocab_size: int


def assemble(config: EngineConfig, api: ApiChannel, wake_up: WakeUp, progress: Callable[[str], None]) -> Engine:
    """Load the model, warm it up, open the transfers. ``progress`` is told each stage.

    Raises ModelError, ConfigError or TransferError if something does not fit.
    """
    folder = Path(config.model_dir)
    decoder = read_decoder_config(folder)
    block_size = config.cache.block_size
    layout = kv_layout(decoder, config.model.dtype, block_size)
    num_blocks = config.cache.kv_cache_mib * MIB // layout.block_bytes
    max_model_len = _max_model_len(config, decoder, num_blocks)
    spec = EngineSpec(
        protocol=PROTOCOL_VERSION,
        fingerprint=fingerprint(folder),
        dtype=config.model.dtype.value,
        block_size=block_size,
        num_layers=decoder.num_layers,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        tp_size=1,
    )
    progress("preparing kernels")
    kernels = cpu_kernels(config.cpu.kernels, Path(config.cache_dir))
    progress("loading weights")
    runner = ModelRunner(folder, decoder, config.model.dtype, block_size, num_blocks, max_model_len, kernels)
    progress("warming up")
    warm_up(runner, min(config.scheduler.max_step_tokens, max_model_len - 1))
    blocks = BlockManager(num_blocks, block_size, prefix_cache=config.cache.prefix_cache is Switch.ON)
    stop = StopRule(decoder.eos_token_ids, max_model_len)
    prompts = PromptRule(decoder.vocab_size, max_model_len)
    connector, control = open_connector(config, spec, runner.kv_cache, blocks, wake_up.set, prompts.misfit)
    loop = StepLoop(
        api=api,
        wake_up=wake_up,
        runner=runner,
        blocks=blocks,
        connector=connector,
        config=config.scheduler,
        stop=stop,
        prompts=prompts,
    )
    return Engine(loop, connector, control, spec, num_blocks, max_model_len, decoder.vocab_size)


def warm_up(runner: ModelRunner, tokens: int) -> None:
    """Let every library allocate and choose its code before the first request: a chunk of a prompt, then a token."""
    blocks = range(-(-(tokens + 1) // runner.layout.block_size))
    for row in (StepRow([0] * tokens, 0, blocks, True), StepRow([0], tokens, blocks, True)):
        runner.run([row])
    runner.kv_cache[: len(blocks)].zero_()


def _max_model_len(config: EngineConfig, decoder: DecoderConfig, num_blocks: int) -> int:
    asked = config.model.max_model_len
    if asked > decoder.max_positions:
        raise ConfigError(f"--max-model-len is {asked}, but the model knows only {decoder.max_positions} positions")
    fitting = num_blocks * config.cache.block_size
    if fitting < 2 or asked > fitting:
        raise ConfigError(
            f"--kv-cache-mib {config.cache.kv_cache_mib} holds {fitting} tokens, which is less than one request needs"
            + (f" (--max-model-len {asked})" if asked else "")
        )
    return min(asked or decoder.max_positions, fitting)
