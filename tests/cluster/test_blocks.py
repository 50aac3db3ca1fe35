"""Tests a P/D cluster that computes from the blocks of the demo model's file.

In every run, ``tests/cli/test_up.py`` asks such a cluster, and ``tests/models/test_demo_gguf.py`` has the tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cli.main import main
from pdserve.config import Dtype
from pdserve.models.checkpoint.cached_tokenizer import gguf_tokenizer
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.model_files import packaged_gguf
from pdserve.models.runner import ModelRunner
from pdserve.settings import cache_folder
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from tests.cluster.nodes import ServedCluster, http, served
from tests.eventually import eventually
from tests.models.greedy import greedy_tokens
from tests.processes import SECRET, clean_environ

pytestmark = pytest.mark.nightly

NEW_TOKENS = 12
TEXTS = [
    "Paris is the capital of France, Rome is the capital of Italy, and the capital of Spain is",
    "Water boils at one hundred degrees Celsius at sea level. On a high mountain it boils at",
    "The first ten letters of the alphabet are a, b, c, d, e, f,",
]


@pytest.fixture(scope="module")
def in_blocks(demo_model: Path) -> Iterator[ServedCluster]:
    """Yields a prefill and a decode node. ``demo_model`` has compiled the kernels."""
    with served(packaged_gguf(), dtype="bf16") as running:
        yield running


def test_tokens_are_those_of_one_engine(in_blocks: ServedCluster) -> None:
    path = packaged_gguf()
    kernels = CompiledKernels(cache_folder(os.environ))
    tokenizer = gguf_tokenizer(path)
    for text in TEXTS:
        prompt: list[int] = tokenizer.encode(text)
        runner = ModelRunner(path, read_decoder_config(path), Dtype.BF16, 16, 8, 128, kernels, block_kernels=kernels)
        assert in_blocks.complete(prompt, NEW_TOKENS, ignore_eos=True) == greedy_tokens(runner, prompt, NEW_TOKENS)
    (decode,) = in_blocks.decode
    eventually(
        lambda: decode.metric("prefills_total", source="remote") == len(TEXTS), "every prompt came from the peer"
    )


def test_an_engine_that_dequantises_is_refused(in_blocks: ServedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    (control,) = {one["control"] for one in http(in_blocks.url + "/instances").json() if one["role"] == "prefill"}
    for more, seen in (
        ((), "the handshake stands"),
        (("--weights", "dequantise"), "the handshake is refused for fingerprint"),
    ):
        flags = ("--peer", control, "--model", str(packaged_gguf()), "--dtype", "bf16", "--device", "cpu", *more)
        main(["doctor", "--probe", "off", "--peer-timeout-s", "30", *flags], clean_environ(PDSERVE_SECRET=SECRET))
        shown = " ".join(capsys.readouterr().out.split())
        assert seen in shown, shown
