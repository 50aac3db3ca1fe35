"""The subject of the measurements: a model in a runner, and the steps that it computes."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from pdserve.config import ModelConfig, Switch
from pdserve.errors import ConfigError, ModelError
from pdserve.models.backend import choose_device, open_backend
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FamilyConfig
from pdserve.models.checkpoint.weights import block_formats, stays_in_blocks
from pdserve.models.layer_groups import layer_groups
from pdserve.models.rank_cache import RankCache
from pdserve.models.runner import CudaGraphs, Graph, ModelRunner, StepRow
from pdserve.wire.cache_groups import GroupBlocks, Keep
from pdserve_kernels.contract import BlockFormat, BlockKernels, Kernels
from pdserve_kernels.kv_layout import KvLayout


def bounded_counts(config: DecoderConfig, num_blocks: int, requests: int) -> list[int]:
    """Returns the blocks of each group behind the first one, which has ``num_blocks``."""
    groups = layer_groups(config).groups[1:]
    return [2 * requests if group.keep is Keep.LATEST else num_blocks for group in groups]


def other_tables(bounded: Sequence[GroupBlocks], blocks: range, request: int) -> list[Sequence[int]]:
    """Returns ``StepRow.others`` of a request which has these blocks of the first group."""
    tables: list[Sequence[int]] = []
    for group in bounded:
        if group.spec.keep is Keep.LATEST:
            present = group.first + 2 * request
            tables.append((present, present + 1))
        else:
            tables.append(range(group.first + blocks.start, group.first + blocks.stop))
    return tables


class Runner(Protocol):
    """The part of ``models.runner.ModelRunner`` that is measured."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def kv_cache(self) -> torch.Tensor: ...

    @property
    def cache(self) -> RankCache: ...

    def run(self, rows: Sequence[StepRow]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """One loaded model."""

    name: str
    config: FamilyConfig
    runner: Runner
    kernels: Kernels
    """The kernel set that the runner computes with."""
    graphs: Callable[[], Graph] | None = None
    """The function that makes graphs, if the runner replays its decode steps."""
    block_kernels: BlockKernels | None = None
    """The kernels for weights that stay in the blocks of their file, if any do."""
    formats: Mapping[str, BlockFormat] = field(default_factory=dict)
    """The formats of these weights, by transformers' names."""

    @property
    def device(self) -> torch.device:
        return self.runner.kv_cache.device

    @property
    def dtype(self) -> torch.dtype:
        return self.runner.layout.dtype

    def kv_bytes(self, context: int) -> float:
        """Returns the bytes of the cache that the last token of a context reads."""
        read = 0.0
        for group in self.runner.cache.attention:
            window = group.blocks.spec.window
            seen = min(context, window) if window else context
            read += seen * group.layout.block_bytes / group.layout.block_size
        return read + sum(group.blocks.block_bytes for group in self.runner.cache.states)

    def decode_rows(self, batch: int, context: int) -> list[StepRow]:
        """Returns one new token for each of ``batch`` requests, as the last of ``context``, in blocks of their own."""
        return self.draft_rows([context - 1] * batch, 1, context)

    def prefill_rows(self, chunk: int) -> list[StepRow]:
        """Returns the rows of a complete prompt of ``chunk`` tokens."""
        return [self._row([1] * chunk, 0, range(-(-chunk // self.runner.layout.block_size)), 0)]

    def draft_rows(self, starts: Sequence[int], count: int, longest: int) -> list[StepRow]:
        """Returns ``count`` rows of one token each for a request at each of ``starts``, its next token and drafts.

        A request has blocks of its own for ``longest`` tokens, and its rows share them.
        """
        blocks = -(-longest // self.runner.layout.block_size)
        return [
            self._row([1], start + number, range(i * blocks, (i + 1) * blocks), i)
            for i, start in enumerate(starts)
            for number in range(count)
        ]

    def _row(self, token_ids: Sequence[int], start: int, blocks: range, request: int) -> StepRow:
        others = other_tables(self.runner.cache.groups[1:], blocks, request)
        return StepRow(token_ids, start, blocks, True, others=others)


_GROWS = 64
"""The context of a request grows by so many tokens, and more than one step gives, before it begins again."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The steps with drafts that are timed."""

    requests: Sequence[int]
    rows: Sequence[int]
    """The numbers of rows of each request: one of them is for no draft."""
    context: int
    acceptances: Sequence[float]
    """The shares of right drafts among those behind right ones."""

    @property
    def longest(self) -> int:
        """The most tokens of a request, with its drafts."""
        return self.context + max(self.rows) + _GROWS

    @property
    def most_rows(self) -> int:
        return max(self.requests) * max(self.rows)


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that are timed."""

    batches: Sequence[int]
    contexts: Sequence[int]
    chunks: Sequence[int]
    drafting: Drafting | None = None

    @property
    def longest(self) -> int:
        return max(*self.contexts, *self.chunks, self.drafting.longest if self.drafting else 0)

    @property
    def most_requests(self) -> int:
        return max(*self.batches, *(self.drafting.requests if self.drafting else ()), 0)

    @property
    def most_rows(self) -> int:
        """The most single tokens that a step computes."""
        return max(*self.batches, self.drafting.most_rows if self.drafting else 0)

    def blocks(self, block_size: int) -> int:
        """Returns the number of blocks that the largest step needs."""
        drafting = self.drafting
        return max(
            max(self.batches) * -(-max(self.contexts) // block_size),
            -(-max(self.chunks) // block_size),
            max(drafting.requests) * -(-drafting.longest // block_size) if drafting else 0,
        )


def open_subject(
    name: str, folder: Path, model: ModelConfig, block_size: int, steps: Steps, cpu_kernels: Callable[[], Kernels]
) -> Subject:
    """Opens the model of ``folder`` with a KV cache for the largest of ``steps``.

    ``cpu_kernels`` makes the kernel set for a CPU. Raises ModelError (also for a fallback model, whose
    products are not known, and for one that attends to chosen tokens), and ConfigError if the model knows fewer
    positions or its device is not there.
    """
    config = read_family_config(folder)
    index = config.blocks if config.latent is None else config.latent.index
    chosen = "" if index is None else "tokens that an indexer chooses"
    chosen = chosen or ("blocks that index heads choose" if config.head_blocks is not None else "")
    if chosen or config.shared is not None:
        raise ModelError(
            f"{name} attends to {chosen or 'entries for several tokens'}, and pdserve bench engine knows what whole "
            "contexts take alone; pdserve bench load measures a node with this model"
        )
    if steps.longest > config.max_positions:
        raise ConfigError(f"{name} knows {config.max_positions} positions; {steps.longest} were asked for")
    backend = open_backend(choose_device(model.device), cpu_kernels)
    on_gpu = backend.device.type != "cpu"
    in_blocks = stays_in_blocks(folder, model, kernels=backend.block_kernels is not None, on_gpu=on_gpu)
    block_kernels = backend.block_kernels if in_blocks else None
    formats = block_formats(folder, on_gpu=on_gpu) if in_blocks else {}
    runner = ModelRunner(
        folder,
        config,
        model.dtype,
        block_size,
        steps.blocks(block_size),
        steps.longest,
        backend.kernels,
        backend.device,
        block_kernels=block_kernels,
        bounded=bounded_counts(config, steps.blocks(block_size), steps.most_requests),
    )
    # Memory that was never written is one shared page of zeros, and reading it is faster than reading a cache in use.
    for group in runner.cache.attention:
        group.cache.fill_(0.01)
    if backend.graph_kernels is None or model.cuda_graphs is Switch.OFF:
        return Subject(name, config, runner, backend.kernels, block_kernels=block_kernels, formats=formats)
    graphs = CudaGraphs()
    runner.capture_decode(backend.graph_kernels, steps.most_rows, graphs)
    return Subject(name, config, runner, backend.kernels, graphs, block_kernels, formats)


_PATTERN = 2**20 + 7
"""The number of weights after which they repeat: drawing billions takes minutes. It is no multiple of a row."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama, in the names of its ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int = 131_072


LLAMA_8B = Shape(4096, 14_336, 32, 32, 8, 128, 128_256)


class Stored(enum.Enum):
    """How a random model's matrices but its embedding and head are stored."""

    BF16 = "bf16"
    INT4 = "4 bits"
    """As compressed-tensors has them, with a scale for 128 inputs."""
    FP8 = "FP8"
    """In e4m3, with a scale for 128 × 128 numbers."""


_GROUP = 128
QUANTISATION: Mapping[Stored, Mapping[str, object]] = {
    Stored.INT4: {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}},
        },
    },
    Stored.FP8: {"quant_method": "fp8", "weight_block_size": [_GROUP, _GROUP], "fmt": "e4m3"},
}


def write_random_model(shape: Shape, folder: Path, stored: Stored = Stored.BF16) -> None:
    """Writes a Hugging Face folder, with one file for each layer; ``LLAMA_8B`` takes 16 GB in bf16."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **asdict(shape),
    }
    if stored is not Stored.BF16:
        config["quantization_config"] = QUANTISATION[stored]
    shards = (
        {name: (size, stored if name.endswith("proj.weight") else Stored.BF16) for name, size in tensors.items()}
        for tensors in _shards(shape)
    )
    write_shards(config, (random_tensors(shard) for shard in shards), folder)


def write_shards(config: Mapping[str, object], shards: Iterable[Mapping[str, torch.Tensor]], folder: Path) -> None:
    """Writes a Hugging Face folder, with one file for each of ``shards``."""
    (folder / "config.json").write_text(json.dumps(config))
    files = {}
    for number, tensors in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        save_file(dict(tensors), folder / file)
        files.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _shards(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    hidden, inner, vocab = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for index in range(shape.num_hidden_layers):
        layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        yield {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}


def random_tensors(weights: Mapping[str, tuple[tuple[int, ...], Stored]]) -> dict[str, torch.Tensor]:
    """Returns the tensors of weights of these sizes, by name. The numbers of matrices have a deviation of some 0.02."""
    numbers = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0))
    made: dict[str, torch.Tensor] = {}
    for name, (size, stored) in weights.items():
        made |= _stored(name, numbers, size, stored)
    return made


def _stored(name: str, numbers: torch.Tensor, size: tuple[int, ...], stored: Stored) -> dict[str, torch.Tensor]:
    """Returns the tensors of one weight, whose numbers have a deviation of some 0.02."""
    if len(size) == 1:
        return {name: torch.ones(size, dtype=torch.bfloat16)}
    outputs, inputs = size
    groups = -(-inputs // _GROUP)
    match stored:
        case Stored.BF16:
            return {name: filled(numbers.mul(0.02).to(torch.bfloat16), size)}
        case Stored.FP8:
            scales = torch.full((-(-outputs // _GROUP), groups), 0.02)
            return {name: filled(numbers.to(torch.float8_e4m3fn), size), f"{name}_scale_inv": scales}
        case Stored.INT4:
            # The bits of random numbers in fp32 are random where their last ones are.
            words = numbers.view(torch.int32) ^ numbers.view(torch.int32).roll(1) << 16
            return {
                f"{name}_packed": filled(words, (outputs, inputs // 8)),
                f"{name}_scale": torch.full((outputs, groups), 0.004, dtype=torch.bfloat16),
                f"{name}_shape": torch.tensor(size),
            }


def filled(pattern: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of ``size`` with the numbers of ``pattern``, ``[numbers]``, again and again."""
    count = prod(size)
    return pattern.repeat(-(-count // len(pattern)))[:count].view(size)
