"""Tests that a prefill and a decode node that compute on the GPU give the tokens of transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.nodes import cluster
from tests.cluster.test_staged_transfers import FLAGS, LENGTHS, NEW_TOKENS, model, prompt, wanted

__all__ = ["model"]


@pytest.mark.parametrize(
    "ways",
    [("--kv-staging-mib", "4"), ("--kv-staging", "off", "--kv-checksums", "off")],
    ids=["through host memory", "from GPU memory to GPU memory"],
)
def test_gpu_nodes_give_the_reference_tokens(model: Path, ways: tuple[str, ...]) -> None:
    prompts = [prompt(length, number) for number in range(4) for length in LENGTHS]
    flags = [*FLAGS, "--device", "cuda", *ways]
    with cluster(model, *flags) as made, ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda ids: made.complete(ids, NEW_TOKENS, ignore_eos=True), prompts)
        assert list(answers) == wanted(model, prompts)
        assert made.decode[0].metric("prefills_total", source="remote") == len(prompts)
        made.until_idle()
