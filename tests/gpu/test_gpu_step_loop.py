"""Tests on a GPU that steps which are launched ahead of their tokens, also recorded ones, change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import Dtype
from pdserve.engine.sampling.pending_tokens import DeviceTokens, HostTokens
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.speculation.speculation import Speculation
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import CudaGraphs, ModelRunner
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.engine.speculation.test_drafts import Asked
from tests.engine.speculation.test_drafts_ahead import now_and_then
from tests.engine.speculation.test_model_drafts import MTP, noted_drafts
from tests.engine.test_step_loop import BLOCK_SIZE, MAX_LEN, engine, prompt
from tests.models.tiny_drafting import ReferenceDrafts, save_tiny_drafting
from tests.tiny_models import save_tiny_model
from tests.tiny_vocabulary import FIRST_BYTE

CUDA = torch.device("cuda", 0)
NUM_BLOCKS = 256
EOS = frozenset({2})
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
]
RULED: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": -0.3, "logit_bias": ((7, 3.0),)},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 1, "logprob_token_ids": (5, 9)},
]
FOLLOWED = {
    "temperature": 1.0,
    "grammar": Grammar(GrammarKind.REGEX, "[a-f,]*"),
    "logit_bias": (*((FIRST_BYTE + ord(letter), 12.0) for letter in "abcdef,"), (FIRST_BYTE + ord("z"), 11.5)),
    "logprobs": 2,
}
CONSTRAINED: list[dict[str, Any]] = [FOLLOWED, FOLLOWED | {"temperature": 0.0, "frequency_penalty": 0.02}]
"""Grammars that refuse some of the tokens that are chosen by these parameters."""
WAITING: list[dict[str, Any]] = [{"temperature": 0.9, "bad_words": ((5, 6),)}]
"""These parameters need their last tokens on the host, so steps with them are not launched ahead."""


def make_runner(folder: Path, captured: bool, *, drafts: bool = False) -> ModelRunner:
    kernels = TritonKernels.of(CUDA)
    shape = (Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN)
    runner = ModelRunner(folder, read_decoder_config(folder), *shape, kernels, CUDA, drafts=drafts)
    if captured:
        runner.capture_decode(kernels, 8, CudaGraphs())
    return runner


def answers(runner: ModelRunner, folder: Path, overlap: bool) -> list[list[int]]:
    found = []
    with engine(folder, overlap, num_blocks=NUM_BLOCKS, own_runner=runner) as client:
        for parameters in (
            PARAMETERS,
            PARAMETERS + RULED,
            PARAMETERS[2:] + RULED[:2] + WAITING,
            CONSTRAINED + PARAMETERS[:2] + RULED[:2],
        ):
            asked = [
                (
                    prompt(5 + 9 * i),
                    SamplingParams(seed=i, max_tokens=20 + 7 * i, ignore_eos="grammar" not in own, **own),
                    (),
                )
                for i, own in enumerate(parameters)
            ]
            found += [answer.tokens for answer in client.together(asked).values()]
    return found


def test_steps_ahead_of_their_tokens_give_the_same_answers(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    wanted = answers(make_runner(folder, captured=False), folder, overlap=False)
    for captured in (False, True):
        assert answers(make_runner(folder, captured), folder, overlap=True) == wanted


@pytest.mark.parametrize("captured", [False, True])
def test_a_layer_drafts_behind_steps_ahead_what_it_drafts_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    folder = save_tiny_drafting("glm4-moe", tmp_path)
    drafted = noted_drafts(monkeypatch)
    monkeypatch.setattr(Speculation, "_model_count", now_and_then)
    runner = make_runner(folder, captured, drafts=True)
    asked: Asked = [
        (prompt(5 + 9 * i), SamplingParams(seed=i, max_tokens=30, ignore_eos="grammar" not in own, **own), ())
        for i, own in enumerate([*PARAMETERS, *CONSTRAINED])
    ]
    with engine(folder, True, num_blocks=NUM_BLOCKS, own_runner=runner, scheduler=MTP, drafts=True) as client:
        client.together(asked)
        stats = client.stats_asked_for(1)
    assert stats.steps_ahead > 0.4 * stats.steps
    reference = ReferenceDrafts("glm4-moe", folder)
    found = [each for each in drafted if each.drafts][-30:]
    # Sums of other kernels are rounded otherwise, so a drawn draft may be another one.
    assert sum(each.right(reference) for each in found) >= 0.8 * len(found) > 15


def test_rules_and_reports_do_not_wait_for_the_gpu() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 5000, device=CUDA)
    kinds: list[dict[str, Any]] = [
        *PARAMETERS[:2],
        *RULED,
        {"temperature": 0.0, "allowed_token_ids": tuple(range(9, 900)), "bad_words": ((11,),), "min_tokens": 20},
    ]
    rows = [
        SamplingRow(SamplingParams(max_tokens=9, seed=i, **own), [3, 1, *range(i)], 2, 1) for i, own in enumerate(kinds)
    ]
    last = torch.arange(7, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = DeviceTokens(logits, rows, range(7), EOS, last)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    known = [
        SamplingRow(SamplingParams(max_tokens=9, seed=i, **own), [3, 1, *range(i), i], 2) for i, own in enumerate(kinds)
    ]
    assert tokens.read() == HostTokens(logits, known, range(7), EOS).read()
