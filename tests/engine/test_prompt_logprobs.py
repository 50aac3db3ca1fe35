"""Tests that engines report the log probabilities of prompts' tokens as transformers has them, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pdserve.config import Dtype
from pdserve.models import runner as runner_module
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import ModelRunner
from pdserve.wire.engine import PrefillSource
from pdserve.wire.sampling_params import PromptLogprobs, SamplingParams
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from tests.engine.kv_connector.test_connectors_faulty_blocks import Threads
from tests.engine.test_step_loop import BLOCK_SIZE, MAX_LEN, Answer, Client, engine, prompt
from tests.tiny_models import VOCAB_SIZE, reference_logits, save_tiny_model

TOP = 5
WITHIN = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def scored(max_tokens: int = 3, top: int = TOP) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True, prompt_logprobs=top)


def scores_of(answer: Answer) -> PromptLogprobs:
    """Returns the only log probabilities of the prompt that came, which came before any token."""
    came = [output.prompt_logprobs for output in answer.outputs if output.prompt_logprobs is not None]
    assert len(came) == 1
    assert answer.outputs[0].prompt_logprobs is came[0]
    return came[0]


def check(folder: Path, token_ids: Sequence[int], scores: PromptLogprobs, top: int = TOP) -> None:
    wanted = reference_logits(folder, token_ids)[:-1].log_softmax(-1)
    assert scores.fits(len(token_ids) - 1, top)
    tokens = scores.tokens(0, len(token_ids))
    assert tokens == scores.tokens(0, 3) + scores.tokens(3, len(token_ids))
    assert len(tokens) == len(token_ids) - 1
    for token_id, row, token in zip(token_ids[1:], wanted, tokens, strict=True):
        assert token.chosen == pytest.approx(row[token_id].item(), abs=WITHIN)
        best = row.topk(top)
        assert [logprob for _, logprob in token.top] == pytest.approx(best.values.tolist(), abs=WITHIN)
        assert [row[token_id].item() for token_id, _ in token.top] == pytest.approx(best.values.tolist(), abs=WITHIN)
        assert (token.rank == 1) == (token.chosen == token.top[0][1])


@pytest.mark.parametrize("overlap", [False, True])
def test_they_are_those_of_transformers_however_the_prompt_is_cut_and_cached(
    folder: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A piece of logits has two tokens, and a step has sixteen.
    monkeypatch.setattr(runner_module, "SCORED_LOGITS", 2 * VOCAB_SIZE)
    with engine(folder, overlap) as client:
        for length in (2, 4, 5, 17, 18, 33, 40):
            plain = client.ask(prompt(length), [3])
            answers = client.together([(prompt(length), scored(), (5, 6)), (prompt(length + 1), scored(top=0), ())])
            family = list(answers.values())
            check(folder, prompt(length), scores_of(family[0]))
            assert not any(output.prompt_logprobs for child in family[1:3] for output in child.outputs)
            assert scores_of(family[3]).fits(length, 0)
            assert family[0].end.report is not None
            assert family[0].end.report.cached_tokens == 0
            # What was computed for the log probabilities is found by others.
            assert client.ask(prompt(length), [3]) == plain


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_is_only_scored_may_be_as_long_as_the_context(folder: Path, overlap: bool) -> None:
    whole = prompt(MAX_LEN)
    with engine(folder, overlap, num_blocks=MAX_LEN // BLOCK_SIZE) as client:
        family = list(client.together([(whole, scored(max_tokens=1), (5,))]).values())
        check(folder, whole, scores_of(family[0]))
        assert [len(answer.tokens) for answer in family] == [1, 1]
        for sampling in (scored(max_tokens=2), SamplingParams(max_tokens=1, seed=1)):
            [refused] = client.together([(whole, sampling, ())]).values()
            assert refused.end.error == f"the prompt has {MAX_LEN} tokens; with one of output, at most {MAX_LEN} fit"
        [refused] = client.together([([*whole, 3], scored(max_tokens=1), ())]).values()
        assert "at most" in (refused.end.error or "")


def test_a_prompt_of_one_token_has_none(folder: Path) -> None:
    with engine(folder, overlap=False) as client:
        (answer,) = client.together([([7], scored(), ())]).values()
        assert all(output.prompt_logprobs is None for output in answer.outputs)


def test_they_survive_preemption(folder: Path) -> None:
    with engine(folder, overlap=False, num_blocks=22) as client:
        asked = [(prompt(20 + i), scored(max_tokens=30), ()) for i in range(3)]
        for (token_ids, _, _), answer in zip(asked, client.together(asked).values(), strict=True):
            check(folder, token_ids, scores_of(answer))
        client.wait_for_a_preemption()


def test_a_resumed_answer_has_them_too(folder: Path) -> None:
    """One answer is in the client's hands, and another one to the same prompt is not begun."""
    with engine(folder, overlap=False) as client:
        asked = [(prompt(21), scored(max_tokens=8), (2,))]
        whole = list(client.together(asked).values())
        resumed = list(client.together(asked, emitted=[[whole[0].tokens[:5], ()]]).values())
        check(folder, prompt(21), scores_of(resumed[0]))
        assert resumed[0].tokens == whole[0].tokens[5:]
        assert resumed[1].tokens == whole[1].tokens


@pytest.mark.integration
def test_they_come_from_a_prefill_engine_with_the_first_token(folder: Path) -> None:
    with engine(folder, overlap=False) as mixed:
        wanted = scores_of(only(mixed, 33))
    threads = Threads()
    with (
        engine(folder, overlap=False, connect=threads.connector(True, lambda: UcxTransport(""))),
        engine(folder, overlap=False, connect=threads.connector(False, lambda: UcxTransport(""))) as decode,
    ):
        assert threads.target is not None
        decode.targets = (threads.target,)
        for salt in ("", "", "again"):
            answer = only(decode, 33, salt)
            assert scores_of(answer) == wanted
            assert answer.end.report is not None
            assert answer.end.report.prefill_source is PrefillSource.REMOTE


def only(client: Client, length: int, salt: str = "") -> Answer:
    (answer,) = client.together([(prompt(length), scored(), ())], salt).values()
    return answer


def test_a_request_without_them_costs_nothing_more(folder: Path) -> None:
    """The head computes the logits of the last token alone."""
    heads = []
    runner = ModelRunner(folder, read_decoder_config(folder), Dtype.FP32, BLOCK_SIZE, 64, MAX_LEN, TorchKernels())
    compute = runner._decoder.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        heads.append(len(hidden))
        return compute(hidden)

    runner._decoder.logits = logits  # type: ignore[method-assign]
    with engine(folder, overlap=False, own_runner=runner) as client:
        client.ask(prompt(14), [1], max_tokens=3)
        assert heads == [1, 1, 1]
        client.together([(prompt(14), scored(), ())])
        assert heads == [1, 1, 1, 13, 1, 1, 1]
