"""Times the parts of a step, and what a device can do at best, as a yardstick for them.

The parts are linear layers alone, which every engine needs, attention over all layers, and sampling.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from llguidance import LLTokenizer

from pdserve.bench.engine.subject import Subject
from pdserve.bench.report import Better, Figure, Row, Unit, measured
from pdserve.config import KvCacheDtype
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.errors import ConfigError
from pdserve.grammars.compiling import compile_grammar
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.layer_groups import check_kv_dtype
from pdserve.models.rank_cache import TORCH_DTYPES, KvGroup, RankCache
from pdserve.models.recipe import ExpertsRecipe, LatentRecipe
from pdserve.models.runner import Graph, StepRow
from pdserve.models.tp.shares import ALONE
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels import reference
from pdserve_kernels.contract import (
    Attention,
    AttentionRow,
    BlockFormat,
    BlockKernels,
    BlockWeight,
    Experts,
    ExpertsForm,
    ExpertWeights,
    Kernels,
    Linear,
    UnreadWeight,
)

_WARM_UP = 2
_LEAST = 3

DISTINCT_BYTES = 2 * 2**30
"""No cache holds this many bytes of different weights. Layers beyond them use the same weights again."""
RECORDED = 64
"""Steps of up to so many rows are replayed from a graph where the kernels can be recorded."""
_ANY_BYTE = 0x2A
"""The byte that weights in blocks consist of here: as a scale, two of them are a usual number."""


def seconds_of(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Returns the median time of ``call`` and its work on ``device`` over at least 3 calls and ``budget_s``."""
    for _ in range(_WARM_UP):
        call()
    _finish(device)
    times: list[float] = []
    while len(times) < _LEAST or sum(times) < budget_s:
        start = time.perf_counter()
        call()
        _finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_SIDE = {"cpu": 2048, "cuda": 8192}
"""The side of the square matrices, which are large enough for arithmetic to be the limit."""
_PROBE_SIDE = 256
"""The side of those that show whether a CPU can multiply a number format."""
_PROBE_S = 0.02
_ONE_BY_ONE = 20.0
"""Products that take so many times as long as in fp32 are made number by number: usually it is some 400 times."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The measured limits of one device."""

    device: torch.device
    copy_bytes_per_s: float
    """The bytes read plus the bytes written: a kernel that only reads could read as many in that time."""
    triad_bytes_per_s: float
    """The bytes of ``a = b + s * c``: two of three are read."""
    flops: float
    """The rate of a large matrix product in the model's dtype, or in fp32 where that is faster (``product_dtype``)."""
    byte_ops: float = math.nan
    """The rate of a large product of bytes, if it was measured: weights in blocks are multiplied as such, and on a GPU
    those in FP8 as numbers in FP8. On a CPU it is that of numbers in fp32 where that is higher."""

    @property
    def bytes_per_s(self) -> float:
        """The highest rate at which memory was read and written."""
        return max(self.copy_bytes_per_s, self.triad_bytes_per_s)

    def row(self) -> Row:
        figures = measured(
            Figure("copy, read + write", self.copy_bytes_per_s / 1e9, Unit.GB_PER_S, Better.HIGHER),
            Figure("triad, read + write", self.triad_bytes_per_s / 1e9, Unit.GB_PER_S, Better.HIGHER),
            Figure("matrix product", self.flops / 1e12, Unit.TFLOP_PER_S, Better.HIGHER),
            Figure("product of bytes", self.byte_ops / 1e12, Unit.TOP_PER_S, Better.HIGHER),
        )
        return Row("hardware", {"device": self.device.type, "threads": torch.get_num_threads()}, figures)


def measure(
    device: torch.device, dtype: torch.dtype, copy_mib: int, budget_s: float, *, byte_products: bool = False
) -> Hardware:
    """Measures the limits of ``device``. Each of three buffers has ``copy_mib``; no cache should hold them all."""
    source = torch.ones(copy_mib * 2**20 // 4, dtype=torch.float32, device=device)
    target, other = torch.empty_like(source), torch.ones_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), device, budget_s)
    triad_s = seconds_of(lambda: torch.add(source, other, alpha=3.0, out=target), device, budget_s)
    side = _SIDE[device.type]
    product_s = seconds_of(_product(side, device, product_dtype(dtype, device)), device, budget_s)
    byte_ops = math.nan
    if byte_products:
        kind = product_dtype(torch.int8, device) if device.type == "cpu" else torch.float8_e4m3fn
        byte_s = seconds_of(_product(side, device, kind), device, budget_s)
        byte_ops = 2 * side**3 / byte_s
    return Hardware(device, 2 * source.nbytes / copy_s, 3 * source.nbytes / triad_s, 2 * side**3 / product_s, byte_ops)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns ``dtype``, or fp32 if this device's own products of such matrices are far slower than those of fp32.

    A CPU without instructions for bf16 or bytes multiplies them one by one in torch, hundreds of times slower. The
    compiled kernels make fp32 of them there, too. A small product shows which it is.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    own_s, fp32_s = (
        seconds_of(_product(_PROBE_SIDE, device, kind), device, _PROBE_S) for kind in (dtype, torch.float32)
    )
    return torch.float32 if own_s > _ONE_BY_ONE * fp32_s else dtype


def _product(side: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Returns a call that multiplies two square matrices."""
    if dtype == torch.int8:
        numbers = torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device)
        return lambda: torch._int_mm(numbers, numbers)
    left = torch.randn(side, side, device=device).to(dtype)
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, left.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return lambda: left @ left


@dataclass(frozen=True, slots=True)
class Product:
    """One product with a weight, of which ``format`` says whether it stays in blocks."""

    outputs: int
    inputs: int
    format: BlockFormat | None = None

    @property
    def parameters(self) -> int:
        return self.outputs * self.inputs

    def nbytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of the weight, which is in ``dtype`` if it is not in blocks."""
        if self.format is None:
            return self.parameters * dtype.itemsize
        return self.outputs * (self.inputs // self.format.elements) * self.format.read_bytes


@dataclass(frozen=True, slots=True)
class Products:
    """All products of a step, in their order."""

    layers: tuple[tuple[Product, ...], ...]
    head: Product

    @property
    def layers_parameters(self) -> int:
        return sum(product.parameters for layer in self.layers for product in layer)

    @property
    def parameters(self) -> int:
        """The number of parameters that a decode step reads."""
        return self.layers_parameters + self.head.parameters

    def nbytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of weights that a decode step reads."""
        return sum(product.nbytes(dtype) for layer in self.layers for product in layer) + self.head.nbytes(dtype)


def products_of(config: FamilyConfig, formats: Mapping[str, BlockFormat]) -> Products:
    """Returns the products of a decoder with a gated MLP: projections that share their input and format are one.

    A layer of experts has its router and its shared expert among them, and its experts not: see ``expert_layers``.

    ``formats`` are those of the weights that stay in blocks, by transformers' names.
    """
    hidden = config.hidden_size
    attention = _attending(config) if config.latent is None else _attending_to_latents(config, config.latent)

    def layer(index: int) -> Iterator[Product]:
        for inputs, projections in (*attention, *_feeding(config, index)):
            found = [(formats.get(f"model.layers.{index}.{name}.weight"), outputs) for name, outputs in projections]
            for form, group in groupby(found, key=lambda each: each[0]):
                yield Product(sum(outputs for _, outputs in group), inputs, form)

    form = formats.get("model.embed_tokens.weight" if config.recipe.tied else "lm_head.weight")
    layers = tuple(tuple(layer(index)) for index in range(config.num_layers))
    return Products(layers, Product(config.vocab_size, hidden, form))


def _attending(config: FamilyConfig) -> _Parts:
    hidden = config.hidden_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return (
        (hidden, (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys))),
        (queries, (("self_attn.o_proj", hidden),)),
    )


def _attending_to_latents(config: FamilyConfig, latent: LatentRecipe) -> _Parts:
    """Returns the products of latent attention. Each head's own are here one product with as many parameters."""
    hidden, heads, key = config.hidden_size, config.heads, ("self_attn.kv_a_proj_with_mqa", latent.channels)
    queries, inner = heads * (latent.plain + latent.turned), latent.query_rank
    down: _Parts = ((hidden, (("self_attn.q_proj", queries), key)),)
    if inner:
        down = ((hidden, (("self_attn.q_a_proj", inner), key)), (inner, (("self_attn.q_b_proj", queries),)))
    return (
        *down,
        (latent.plain, (("", heads * latent.rank),)),
        (latent.rank, (("", heads * latent.value),)),
        (heads * latent.value, (("self_attn.o_proj", hidden),)),
    )


_Parts = Sequence[tuple[int, Sequence[tuple[str, int]]]]
"""Numbers of inputs, and the names and outputs of the projections of these."""


def _feeding(config: FamilyConfig, index: int) -> _Parts:
    """Returns the products of a layer's feed-forward parts that each token is multiplied with."""
    hidden, found = config.hidden_size, list[tuple[int, Sequence[tuple[str, int]]]]()
    for part in config.recipe.layers[index].feeding or (None,):
        names, inner = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), config.intermediate_size
        if isinstance(part, ExpertsRecipe):
            found.append((hidden, ((part.router, part.count),)))
            if part.shared is None:
                continue
            names, inner = (part.shared.gate, part.shared.up, part.shared.down), part.shared.channels
        gate, up, down = names
        found += [(hidden, ((gate, inner), (up, inner))), (inner, ((down, hidden),))]
    return found


class LinearStack:
    """A step's products in their order, with made-up weights, in plain torch and in the form of a kernel set."""

    def __init__(
        self,
        products: Products,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        block_kernels: BlockKernels | None = None,
    ) -> None:
        """``block_kernels`` are needed if a product is in blocks."""
        layer_bytes = sum(product.parameters for product in products.layers[0]) * dtype.itemsize
        distinct = min(len(products.layers), -(-DISTINCT_BYTES // layer_bytes))
        self._device = device
        self._plain_dtype = product_dtype(dtype, device)
        self._plain: list[Linear] = []
        self._kernel: list[Linear] = []
        self._inputs: list[int] = []
        made: dict[tuple[int, int, Product], tuple[Linear, Linear]] = {}
        for at, layer in enumerate((*products.layers, (products.head,))):
            # The head comes after all layers, and has a weight of its own.
            number = at % distinct if at < len(products.layers) else at
            for place, product in enumerate(layer):
                key = (number, place, product)
                if key not in made:
                    made[key] = _linears(product, kernels, dtype, device, block_kernels, self._plain_dtype)
                plain, kernel = made[key]
                self._plain.append(plain)
                self._kernel.append(kernel)
                self._inputs.append(product.inputs)
        self._dtype = dtype

    def plain_s(self, rows: int, budget_s: float) -> float:
        """Returns the time of ``torch.nn.functional.linear`` for all products, in the ``product_dtype``."""
        return self._time(self._plain, rows, budget_s, self._plain_dtype)

    def kernel_s(self, rows: int, budget_s: float) -> float:
        """Returns the time of the kernel set's own products, which have packed weights on a CPU."""
        return self._time(self._kernel, rows, budget_s, self._dtype)

    @torch.inference_mode()
    def _time(self, linears: Sequence[Linear], rows: int, budget_s: float, dtype: torch.dtype) -> float:
        inputs = {size: random_weight((rows, size), dtype, self._device) for size in set(self._inputs)}

        def call() -> None:
            for linear, size in zip(linears, self._inputs, strict=True):
                linear(inputs[size])

        return seconds_of(call, self._device, budget_s)


def _linears(
    product: Product,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    block_kernels: BlockKernels | None,
    plain_dtype: torch.dtype,
) -> tuple[Linear, Linear]:
    """Returns a product in plain torch, whose weight has the ``plain_dtype``, and with a kernel set."""
    weight = random_weight((product.outputs, product.inputs), dtype, device)
    plain = _Plain(weight.to(plain_dtype))
    if product.format is None:
        return plain, kernels.linear(weight)
    assert block_kernels is not None
    row_bytes = product.inputs // product.format.elements * product.format.block_bytes
    blocks = torch.full((product.outputs, row_bytes), _ANY_BYTE, dtype=torch.uint8, device=device)
    return plain, block_kernels.block_linear(BlockWeight(product.format, blocks))


@dataclass(frozen=True, slots=True)
class _Plain:
    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def random_weight(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).mul_(0.02).to(dtype)


@torch.inference_mode()
def attention_s(subject: Subject, rows: list[StepRow], budget_s: float, cache: RankCache | None = None) -> float:
    """Returns the time of planning the attention of a step with ``rows`` and computing it in every layer.

    Where the runner records decode steps, these layers are recorded too, and the time is that of a replay: the host
    would take longer to launch them one by one than the GPU takes to compute them. ``cache`` takes the place of the
    runner's.
    """
    runner, config = subject.runner, subject.config
    groups = (runner.cache if cache is None else cache).attention
    tokens = sum(len(row.token_ids) for row in rows)
    shape = (tokens, config.heads, config.head_dim)
    query = torch.randn(shape, device=subject.device).to(subject.dtype)
    stored = runner.layout.tiles_a_layer
    key_value = torch.full((stored, tokens, config.kv_heads, config.head_dim), 0.01, device=subject.device)
    key_value = key_value.to(subject.dtype)

    def planned(group: KvGroup) -> Attention:
        spans = [
            AttentionRow(len(row.token_ids), row.context_len, *group.held(row.table(group.number), row.start))
            for row in rows
        ]
        return subject.kernels.plan_attention(
            group.layout, group.cache, spans, config.heads, config.attention_scale, config.attention_cap
        )

    def attend(plans: Sequence[Attention]) -> None:
        for group, plan in zip(groups, plans, strict=True):
            # The last layer of whole contexts may be one that steps do not compute.
            drafting = config.has_draft_layer and group.number == 0
            for layer in range(group.layout.num_layers - drafting):
                plan(layer, query, key_value, group.blocks.spec.window or None)

    def call() -> None:
        attend([planned(group) for group in groups])

    if subject.graphs is None or any(len(row.token_ids) > 1 for row in rows):
        return seconds_of(call, subject.device, budget_s)
    plans = [planned(group) for group in groups]
    graph = subject.graphs()
    graph.capture(partial(attend, plans))
    return seconds_of(graph.replay, subject.device, budget_s)


_NEAR_ZERO = 0x70
"""As a number and as an exponent in FP8: together 2 ** -8."""


def fp8_attention_s(subject: Subject, rows: list[StepRow], budget_s: float) -> float | None:
    """Returns ``attention_s`` with a KV cache in FP8, or None if the model has none."""
    try:
        check_kv_dtype(subject.config, KvCacheDtype.FP8)
    except ConfigError:
        return None
    runner = subject.runner
    dtype = next(dtype for dtype, known in TORCH_DTYPES.items() if known is subject.dtype)
    counts = [group.count for group in runner.cache.groups]
    shape = (runner.layout.block_size, counts, ALONE, subject.device)
    cache = RankCache(subject.config, dtype, *shape, kv_dtype=KvCacheDtype.FP8)
    cache.memory.fill_(_NEAR_ZERO)
    return attention_s(subject, rows, budget_s, cache)


@torch.inference_mode()
def sampling_s(subject: Subject, batch: int, sampling: SamplingParams, budget_s: float) -> float:
    """Returns the time of choosing a token for each of ``batch`` requests."""
    logits = torch.randn(batch, subject.config.vocab_size, device=subject.device)
    rows = [SamplingRow(sampling, range(position), 0) for position in range(batch)]
    return seconds_of(lambda: sample(logits, rows), subject.device, budget_s)


@torch.inference_mode()
def constrained_sampling_s(
    subject: Subject, batch: int, sampling: SamplingParams, vocabulary: LLTokenizer, budget_s: float
) -> float:
    """Returns what ``sampling_s`` does, for answers that go on by the grammar of ``sampling``. It must not be None.

    Each call chooses the next token of each answer. An answer that has come to its end, or to ``max_tokens``, begins
    again, so that all parts of a text have their share.
    """
    assert sampling.grammar is not None
    logits = torch.randn(batch, subject.config.vocab_size, device=subject.device)
    compiled = compile_grammar(sampling.grammar, vocabulary)
    answers = [_Answer(GrammarMatcher(compiled), []) for _ in range(batch)]

    def step() -> None:
        rows = [SamplingRow(sampling, answer.tokens, 0, matcher=answer.matcher) for answer in answers]
        for i, sampled in enumerate(sample(logits, rows, subject.config.eos_token_ids)):
            assert sampled is not None
            answers[i].tokens.append(sampled.token_id)
            ends = sampled.token_id in subject.config.eos_token_ids
            if ends or len(answers[i].tokens) == sampling.max_tokens:
                answers[i] = _Answer(GrammarMatcher(compiled), [])

    return seconds_of(step, subject.device, budget_s)


@dataclass(frozen=True, slots=True)
class _Answer:
    matcher: GrammarMatcher
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer, by the products of one of them."""

    recipe: ExpertsRecipe
    inner: tuple[Product, ...]
    down: Product

    @property
    def parameters(self) -> int:
        """Those that one token is multiplied with."""
        return self.recipe.chosen * (sum(each.parameters for each in self.inner) + self.down.parameters)

    def nbytes(self, dtype: torch.dtype, tokens: int) -> float:
        """Returns the bytes of the experts that so many tokens are sent to, if all experts are equally likely."""
        missed = (1 - self.recipe.chosen / self.recipe.count) ** tokens
        return self.recipe.count * (1 - missed) * self.one_bytes(dtype)

    def one_bytes(self, dtype: torch.dtype) -> int:
        return sum(each.nbytes(dtype) for each in (*self.inner, self.down))


def expert_layers(config: FamilyConfig, formats: Mapping[str, BlockFormat]) -> list[ExpertLayer]:
    """Returns the experts of all layers that have some. ``formats`` are those of ``products_of``."""
    found = []
    parts = [(index, part) for index, layer in enumerate(config.recipe.layers) for part in layer.feeding]
    for index, recipe in parts:
        if not isinstance(recipe, ExpertsRecipe):
            continue
        one, prefix = recipe.expert, config.recipe.prefix(index)

        def form(name: str, prefix: str = prefix) -> BlockFormat | None:
            return formats.get(f"{prefix}{name.replace('{}', '0')}.weight")

        hidden, channels = config.hidden_size, one.channels
        if one.fused:
            inner: tuple[Product, ...] = (Product(2 * channels, hidden, form(one.fused)),)
        else:
            inner = tuple(Product(channels, hidden, form(name)) for name in (one.gate, one.up) if name)
        found.append(ExpertLayer(recipe, inner, Product(hidden, channels, form(one.down))))
    return found


class ExpertStack:
    """The experts of a step in their order, with made-up weights, in the form of a kernel set."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        graphs: Callable[[], Graph] | None = None,
    ) -> None:
        """``graphs`` makes graphs, if steps of few rows are to be recorded."""
        self._dtype, self._device, self._graphs, self._hidden = dtype, device, graphs, layers[0].down.outputs
        self.layers = layers
        whole = layers[0].recipe.count * layers[0].one_bytes(dtype)
        distinct = min(len(layers), -(-DISTINCT_BYTES // whole))
        made = [self._made(kernels, layer) for layer in layers[:distinct]]
        self._experts = [made[at % distinct] for at in range(len(layers))]

    @torch.inference_mode()
    def seconds(self, rows: int, budget_s: float) -> tuple[float, float]:
        """Returns the time of all layers, and the bytes of the experts that their rows are sent to."""
        random = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, self._hidden, generator=random).to(self._dtype).to(self._device)
        logits = [torch.randn(rows, layer.recipe.count, generator=random) for layer in self.layers]
        touched = 0
        for given, layer in zip(logits, self.layers, strict=True):
            chosen: list[int] = reference.route(given, layer.recipe.routing)[1].flatten().tolist()
            touched += len(set(chosen)) * layer.one_bytes(self._dtype)
        on_device = [given.to(self._device) for given in logits]

        def call() -> None:
            for experts, given in zip(self._experts, on_device, strict=True):
                experts(x, given)

        if self._graphs is None or rows > RECORDED:
            return seconds_of(call, self._device, budget_s), touched
        graph = self._graphs()
        graph.capture(call)
        return seconds_of(graph.replay, self._device, budget_s), touched

    def _made(self, kernels: Kernels, layer: ExpertLayer) -> Experts:
        recipe = layer.recipe
        form = ExpertsForm(
            recipe.count,
            self._hidden,
            recipe.expert.channels,
            self._dtype,
            recipe.routing,
            recipe.expert.activation,
            recipe.expert.gated,
            recipe.weighs_inputs,
        )

        def weights() -> Iterator[ExpertWeights]:
            for _ in range(recipe.count):
                yield ExpertWeights(tuple(map(self._weight, layer.inner)), self._weight(layer.down))

        return kernels.experts(form, weights())

    def _weight(self, product: Product) -> UnreadWeight | BlockWeight:
        shape = (product.outputs, product.inputs)
        if product.format is None:
            return UnreadWeight("", shape, self._dtype, lambda: random_weight(shape, self._dtype, self._device))
        row_bytes = product.inputs // product.format.elements * product.format.block_bytes
        blocks = torch.full((product.outputs, row_bytes), _ANY_BYTE, dtype=torch.uint8, device=self._device)
        return BlockWeight(product.format, blocks)


def experts_row(name: str, hardware: Hardware, stack: ExpertStack, batch: int, budget_s: float) -> Row:
    """Returns a row for the experts of a step of so many tokens, beside the time in which as many bytes are copied."""
    seconds, touched = stack.seconds(batch, budget_s)
    operations = 2 * batch * sum(layer.parameters for layer in stack.layers)
    figures = (
        Figure("experts", seconds * 1e3, Unit.MS, Better.LOWER),
        Figure("bytes of those touched", touched / 2**20, Unit.MIB),
        Figure("weights read", touched / seconds / 1e9, Unit.GB_PER_S, Better.HIGHER),
        Figure("experts : least", seconds / (touched / hardware.copy_bytes_per_s), Unit.RATIO, Better.LOWER),
        Figure("rate : matrix product", operations / seconds / hardware.flops, Unit.RATIO, Better.HIGHER),
    )
    return Row("experts alone", {"model": name, "batch": batch}, figures)
