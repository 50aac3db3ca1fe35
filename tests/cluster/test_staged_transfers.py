"""Tests that a P/D pair whose KV blocks pass through host memory, as on GPUs, gives the tokens of transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdserve_kvtransfer.events import FailureKind
from tests.cluster.nodes import cluster
from tests.tiny_models import Reference, random_prompt, save_tiny_chat_model

NEW_TOKENS = 6
ROUNDS = 16
"""The number of rounds, each of one request of each length. Together they need several times the host memory."""
LENGTHS = (17, 100, 400)
LONG = 2_400
"""The tokens of a prompt whose blocks never fit into host memory together."""
FLAGS = (
    "--overlap-scheduling",
    "on",
    "--dtype",
    "fp32",
    "--kv-cache-mib",
    "8",
    "--max-num-batched-tokens",
    "64",
    "--max-num-seqs",
    "16",
    "--kv-staging",
    "on",
)


def prompt(length: int, number: int = 0) -> list[int]:
    return random_prompt(length, seed=f"{length} {number}")


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny model with the demo model's tokenizer."""
    return save_tiny_chat_model(demo_model, tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


def wanted(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    reference = Reference(model, NEW_TOKENS)
    return [reference.answer(ids) for ids in prompts]


def test_transfers_through_little_host_memory_give_the_reference_tokens(model: Path) -> None:
    prompts = [prompt(length, number) for number in range(ROUNDS) for length in LENGTHS]
    with cluster(model, *FLAGS, "--kv-staging-mib", "1", forked=True) as made, ThreadPoolExecutor(len(prompts)) as pool:
        (decode,) = made.decode
        answers = pool.map(lambda ids: made.complete(ids, NEW_TOKENS, ignore_eos=True), prompts)
        assert list(answers) == wanted(model, prompts)
        failures = {kind.value: decode.metric("kv_transfer_failures_total", reason=kind.value) for kind in FailureKind}
        assert failures == dict.fromkeys(failures, 0)
        assert decode.metric("prefills_total", source="remote") == len(prompts)
        long = prompt(LONG)
        assert made.complete(long, NEW_TOKENS, ignore_eos=True) == wanted(model, [long])[0]
        assert decode.metric("prefills_total", source="remote") == len(prompts) + 1
        made.until_idle()
