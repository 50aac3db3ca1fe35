"""Clusters whose KV cache is in FP8: the tokens are those of one engine that computes alone, whatever moved where."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdserve.config import Dtype, KvCacheDtype
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.layer_groups import layer_groups
from pdserve.settings import cache_folder
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kvtransfer.pieces import head_map
from tests.cluster import test_tensor_parallel as ranked
from tests.cluster.nodes import Cluster, cluster
from tests.cluster.test_group_return import FEW, MANY, Stream
from tests.cluster.test_tensor_parallel import KV_HEADS, NEW_TOKENS, NOT_MAPPED, PROMPTS, STAGED, Pair, clusters
from tests.eventually import eventually
from tests.faults.test_node_death import kill
from tests.models.greedy import greedy_tokens
from tests.models.grouped_runner import GroupedRunner
from tests.models.tiny_families import save_tiny_chat_family
from tests.nightly import nightly
from tests.tiny_models import random_prompt, save_tiny_chat_model

FP8 = ("--kv-cache-dtype", "fp8")
WINDOWED, LATENTS, INDEXED = "ministral", "deepseek-v3", "glm-moe-dsa"


def alone(model: Path, prompt: list[int], count: int, dtype: Dtype = Dtype.FP32) -> list[int]:
    """Returns the greedy tokens of one runner, which takes the prompt in one chunk."""
    kernels, config = CompiledKernels(cache_folder(os.environ)), read_decoder_config(model)
    blocks = -(-(len(prompt) + count) // 16)
    runner = GroupedRunner(model, config, dtype, 16, blocks, 16 * blocks, kernels, kv_dtype=KvCacheDtype.FP8)
    return greedy_tokens(runner, prompt, count, len(prompt))


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": ranked.HEADS, "num_key_value_heads": KV_HEADS}
    return save_tiny_chat_model(demo_model, tmp_path_factory.mktemp("tiny"), **heads)


def pair(sources: int, targets: int, *flags: str) -> Pair:
    return (sources, (*FP8, *flags)), (targets, FP8)


def staged(sources: int, targets: int) -> Pair:
    return (sources, (*FP8, *STAGED)), (targets, (*FP8, *STAGED))


PAIRS = [staged(1, 2)]
MORE_PAIRS = [
    [pair(1, 1), pair(2, 2)],
    [pair(2, 1), pair(1, 2)],
    [pair(1, 2, *NOT_MAPPED), staged(2, 2)],
]
"""Pairs that do what those of every run do, or less. In every run, ``test_tensor_parallel.py`` maps the memory of ranks
in fp32, ``lasting`` that of one rank in FP8, and ``test_ranks_have_all_latents`` is over UCX. A decode node maps what
all of its peers have, so each of those at a time has one peer.
"""
LATENT_PAIRS = [pair(2, 2, *NOT_MAPPED)]
MORE_LATENT_PAIRS = [pair(2, 1), pair(1, 2, *NOT_MAPPED)]
"""Where two ranks have one rank as their peer. With two on each side, each one takes no more than it has to, too."""


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    return [alone(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("pairs", [PAIRS, *map(nightly, MORE_PAIRS)])
def test_any_ranks_give_the_tokens_of_one_engine(model: Path, wanted: list[list[int]], pairs: Sequence[Pair]) -> None:
    with clusters(model, pairs) as made:
        for one, running in made.items():
            check(running, one, model, wanted)


def check(running: Cluster, pair: Pair, model: Path, wanted: list[list[int]]) -> None:
    (sources, flags), (targets, _) = pair
    mapped = not {*NOT_MAPPED, *STAGED} & {*flags}
    (decode,) = running.decode
    before = decode.metric("kv_transfer_bytes_total", direction="received")
    ranked.check(running, wanted, len(set(head_map(KV_HEADS, sources, targets))) if mapped else 0)
    config = read_decoder_config(model)
    # A prompt's last token is computed at the decode node, with all of its blocks there.
    rows = 2 * config.num_layers * config.kv_heads * sum(-(-len(prompt) // 16) * 16 for prompt in PROMPTS)
    assert decode.metric("kv_transfer_bytes_total", direction="received") - before == rows * (config.head_dim + 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("pairs", [LATENT_PAIRS, nightly(MORE_LATENT_PAIRS)])
def test_ranks_have_all_latents(demo_model: Path, tmp_path: Path, pairs: Sequence[Pair]) -> None:
    """Each rank of a decode node takes them from one rank of the prefill node."""
    model = save_tiny_chat_family(demo_model, LATENTS, tmp_path)
    wanted, config = [alone(model, prompt, NEW_TOKENS) for prompt in PROMPTS], read_decoder_config(model)
    (group,) = layer_groups(config).groups
    with clusters(model, pairs) as made:
        for one, running in made.items():
            (decode,), ((_, flags), (ranks, _)) = running.decode, one
            before = decode.metric("kv_transfer_bytes_total", direction="received")
            ranked.check(running, wanted, 0 if NOT_MAPPED[0] in flags else ranks)
            rows = group.layers * sum(-(-len(prompt) // 16) * 16 for prompt in PROMPTS)
            received = decode.metric("kv_transfer_bytes_total", direction="received") - before
            assert received == ranks * rows * (group.numbers + 1)


@pytest.fixture(
    scope="module", params=[*(pytest.param(case, marks=pytest.mark.nightly) for case in ("llama", WINDOWED)), INDEXED]
)
def lasting(
    request: pytest.FixtureRequest, slow_tiny_model: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Path]]:
    """Yields clusters whose answers last long enough for one of two decode nodes to be lost."""
    model = slow_tiny_model
    if request.param != "llama":
        folder = tmp_path_factory.mktemp(request.param)
        model = save_tiny_chat_family(demo_model, request.param, folder, max_position_embeddings=2048)
    with cluster(model, "--dtype", "bf16", "--kv-cache-mib", "64", *FP8, decode=2) as running:
        yield running, model


@pytest.mark.timeout(600)
def test_an_answer_goes_on_at_another_node_with_the_same_tokens(lasting: tuple[Cluster, Path]) -> None:
    running, model = lasting
    prompt = random_prompt(70, seed=1)
    whole = alone(model, prompt, MANY, Dtype.BF16)
    (prefill,) = running.prefill
    before = prefill.metric("kv_blocks_returned_total")
    stream = Stream(running, "broken", prompt)
    assert stream.read(FEW) == whole[: len(stream.read(FEW))]
    eventually(lambda: prefill.metric("kv_blocks_returned_total") > before, "a part of the answer came back")
    kill(stream.node())
    assert stream.read(MANY) == whole
    assert "request_id=broken resumed" in running.proxy.output
    # The next turn finds what came back.
    turn = [*prompt, *whole, *random_prompt(20, seed=2)]
    found = prefill.metric("prefix_cache_hits_total")
    second = [running.complete(turn, 8, ignore_eos=True) for _ in range(2)]
    assert second == [second[0]] * 2
    assert prefill.metric("prefix_cache_hits_total") > found
