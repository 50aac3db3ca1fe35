"""Tests that a draft model guesses as it is meant to, keeps no blocks, and changes no answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pdserve.config import Dtype, SchedulerConfig, Speculate
from pdserve.engine.request import Request, Status
from pdserve.engine.runner_loading import check_same_vocabulary
from pdserve.engine.speculation.draft_model import DraftModel
from pdserve.engine.speculation.guesses import ModelDrafts
from pdserve.engine.speculation.speculation import Speculation
from pdserve.errors import ConfigError
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import ModelRunner
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.engine.speculation.test_drafts import (
    OFF,
    Asked,
    answered,
    as_many_as_there_are,
    asked_together,
    check_same,
)
from tests.engine.test_step_loop import BLOCK_SIZE, MAX_LEN, Answer, engine, prompt
from tests.models.tiny_families import save_tiny
from tests.terms import made_terms
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

pytestmark = pytest.mark.integration  # for the seconds that it takes

COUNT = 4
AUTO = SchedulerConfig(
    max_num_seqs=12,
    max_num_batched_tokens=96,
    speculation=Speculate.AUTO,
    draft_tokens=COUNT,
    draft_model="another",
)
DRAWN: Asked = [
    (prompt(length), SamplingParams(max_tokens=25, seed=length, temperature=0.8, ignore_eos=True), ())
    for length in (3, 17, 40, 64)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the same number of tokens, which agrees by chance only."""
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Answer]:
    """What the model answers to ``DRAWN`` without drafts."""
    return answered(folder, DRAWN, OFF)[0]


def drafting(folder: Path, num_blocks: int = 160, runner: type[ModelRunner] = ModelRunner) -> DraftModel:
    own = runner(folder, read_decoder_config(folder), Dtype.FP32, BLOCK_SIZE, num_blocks, MAX_LEN, TorchKernels())
    return DraftModel(own, BLOCK_SIZE, num_blocks, MAX_LEN, VOCAB_SIZE, COUNT)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each step draft as much as it may, with the model alone."""
    monkeypatch.setattr(Speculation, "_counts", as_many_as_there_are)
    monkeypatch.setattr(Speculation, "_model_count", lambda self, requests: COUNT)
    monkeypatch.setattr(ModelDrafts, "rate", lambda self, number=0: 0.9)


def text_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    init = Speculation.__init__

    def without_text(self: Speculation, *given: object, **more: object) -> None:
        init(self, *given, **more)  # type: ignore[arg-type]
        self._by_text = False

    monkeypatch.setattr(Speculation, "__init__", without_text)


@pytest.mark.parametrize("at_once", [7, 512], ids=["in parts", "at once"])
def test_a_draft_model_that_is_the_model_is_always_right(
    folder: Path, plain: list[Answer], always: None, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Also where tokens are drawn: its drafts are drawn by the same numbers."""
    monkeypatch.setattr(Speculation, "may_read", lambda self, requests: at_once)
    text_is_not_asked(monkeypatch)
    model = drafting(folder)
    with engine(folder, False, 160, scheduler=AUTO, draft_model=model) as client:
        got = list(client.together(DRAWN).values())
        stats = client.stats_asked_for(1)
    check_same(got, plain)
    assert stats.scheduler.drafts == stats.accepted_drafts > 40
    assert model.num_free == 160


@pytest.mark.parametrize("case", ["llama", pytest.param("qwen3-5", marks=pytest.mark.nightly)])
def test_no_answer_depends_on_a_draft_model(tmp_path: Path, folder: Path, other: Path, always: None, case: str) -> None:
    """Whatever is asked for; some answers are preempted."""
    served = folder if case == "llama" else save_tiny(case, tmp_path)
    asked = asked_together()
    plain, _ = answered(served, asked, OFF)
    model = drafting(other)
    with engine(served, False, 96, scheduler=AUTO, draft_model=model) as client:
        check_same(list(client.together(asked).values()), plain)
        stats = client.stats_asked_for(1)
    assert stats.scheduler.drafts > 100
    assert stats.scheduler.preemptions > 0
    assert model.num_free == 160


def test_without_room_for_a_text_there_are_no_drafts_of_it(
    folder: Path, plain: list[Answer], always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_is_not_asked(monkeypatch)
    for num_blocks in (1, 20):
        model = drafting(folder, num_blocks)
        with engine(folder, False, 160, scheduler=AUTO, draft_model=model) as client:
            check_same(list(client.together(DRAWN).values()), plain)
            drafts = client.stats_asked_for(1).scheduler.drafts
        assert bool(drafts) is (num_blocks > 1)
        assert model.num_free == num_blocks


class Spoiled(ModelRunner):
    """Every third step is not finite, and each cleared block is noted."""

    steps = cleared = 0

    def clear(self, blocks: object) -> None:
        super().clear(blocks)  # type: ignore[arg-type]
        self.cleared += 1

    def run(self, *given: object, **more: object) -> torch.Tensor:
        logits = super().run(*given, **more)  # type: ignore[arg-type]
        self.steps += 1
        return logits * torch.nan if self.steps % 3 == 0 else logits


def test_a_draft_model_whose_logits_are_not_finite_drafts_less_and_changes_nothing(
    folder: Path, plain: list[Answer], always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_is_not_asked(monkeypatch)
    model = drafting(folder, runner=Spoiled)
    with engine(folder, False, 160, scheduler=AUTO, draft_model=model) as client:
        check_same(list(client.together(DRAWN).values()), plain)
        stats = client.stats_asked_for(1)
    assert stats.scheduler.drafts == stats.accepted_drafts > 0
    assert isinstance(model.runner, Spoiled)
    assert model.runner.cleared > 0
    assert model.num_free == 160


def test_what_is_read_is_read_once_and_wrong_drafts_are_written_over(folder: Path) -> None:
    """After any continuation, the drafts are those of a draft model that has read nothing before."""
    model, counted = drafting(folder), list[int]()
    run = model.runner.run

    def counting(rows: list, *more: object) -> torch.Tensor:  # type: ignore[type-arg]
        counted.append(sum(len(row.token_ids) for row in rows))
        return run(rows, *more)  # type: ignore[arg-type]

    model.runner.run = counting  # type: ignore[method-assign,assignment]
    request = made(prompt(20))
    ((first, *_),) = model.draft([request], COUNT, 99)
    assert counted == [20, 1, 1, 1]
    for more, known in (([first], 1), ([first + 1], 1), ([5, 6, 7], 3), ([8], 1)):
        request.token_ids += [token % VOCAB_SIZE for token in more]
        counted.clear()
        drafts = model.draft([request], COUNT, 99)
        assert counted[0] <= known + 1
        assert drafts == drafting(folder).draft([made(request.token_ids)], COUNT, 99)
    request.ended = True
    assert model.draft([], 0, 0) == []
    assert model.num_free == 160


def made(tokens: list[int]) -> Request:
    request = Request(
        uuid=bytes(16),
        token_ids=list(tokens),
        num_prompt_tokens=20,
        sampling=SamplingParams(max_tokens=40, seed=1, temperature=0.0),
        arrived=0.0,
        terms=made_terms(),
        local_id=1,
    )
    request.move(Status.RUNNING)
    return request


def test_a_model_with_another_tokeniser_cannot_draft(demo_model: Path, tmp_path: Path) -> None:
    check_same_vocabulary(demo_model, demo_model, tmp_path / "cache")
    for file in ("config.json", "tokenizer_config.json"):
        shutil.copy(demo_model / file, tmp_path)
    tokenizer = json.loads((demo_model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġof"] = vocabulary["Ġof"], vocabulary["Ġthe"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="needs the tokeniser of the model"):
        check_same_vocabulary(tmp_path, demo_model, tmp_path / "cache")
