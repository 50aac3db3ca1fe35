"""Tests that an engine has the model draft what it would draft of the whole text, and that no answer depends on it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from pdserve.config import SchedulerConfig, Speculate
from pdserve.engine import step_loop
from pdserve.engine.request import Request
from pdserve.engine.sampling.token_choice import guess
from pdserve.engine.speculation.guesses import ModelDrafts
from pdserve.engine.speculation.speculation import Speculation
from pdserve.wire.sampling_params import SamplingParams
from tests.engine.speculation.test_drafts import (
    OFF,
    Asked,
    answered,
    as_many_as_there_are,
    asked_together,
    check_same,
    texts,
)
from tests.engine.test_step_loop import Answer, engine, prompt
from tests.models.tiny_drafting import ReferenceDrafts, agreeing, save_tiny_drafting
from tests.nightly import nightly

pytestmark = pytest.mark.integration  # for the seconds that it takes

COUNT = 3
MTP = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=96, speculation=Speculate.MTP, draft_tokens=COUNT)
CASES = ("deepseek-v3", nightly("glm4-moe"), "qwen3-next")
"""Layers that draft with latents, and with keys and values: behind others like them, and behind states."""


class Drafted(NamedTuple):
    """What the model has drafted of what follows a text."""

    text: list[int]
    drafts: list[int]
    sampling: SamplingParams
    num_generated: int

    def right(self, reference: ReferenceDrafts) -> bool:
        """Returns whether they are the drafts of the whole text, drawn as its tokens are."""

        def choose(logits: torch.Tensor, rows: Sequence[int], number: int) -> torch.Tensor:
            return guess(logits, [self.sampling], [self.num_generated + number])[0]

        return reference.drafts(self.text, len(self.drafts), choose) == self.drafts


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_drafting(case, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Answer]:
    """What the model answers to ``asked_together`` without drafts."""
    return answered(folder, asked_together(), OFF)[0]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Has each step draft as much as it may, and returns what is drafted."""
    monkeypatch.setattr(Speculation, "_model_count", lambda self, requests: COUNT)
    return noted_drafts(monkeypatch)


def noted_drafts(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Has each step check as many drafts as there are, and returns what is drafted."""
    found: list[Drafted] = []
    put = Speculation.put

    def noted(self: Speculation, request: Request, drafts: Sequence[int]) -> None:
        found.append(Drafted(list(request.token_ids), list(drafts), request.sampling, request.num_generated_tokens))
        put(self, request, drafts)

    monkeypatch.setattr(Speculation, "put", noted)
    monkeypatch.setattr(Speculation, "_counts", as_many_as_there_are)
    monkeypatch.setattr(ModelDrafts, "rate", lambda self, number=0: 0.9)
    return found


@pytest.mark.parametrize("num_blocks", [160, 48], ids=["roomy", "tight"])
def test_drafts_are_those_of_the_whole_text(case: str, folder: Path, drafted: list[Drafted], num_blocks: int) -> None:
    """Chunks, cached prefixes, preempted and replayed answers, and wrong drafts before leave the same behind."""
    asked = [
        (prompt(length), SamplingParams(max_tokens=25, seed=length, temperature=0.7, ignore_eos=True), ())
        for length in (3, 17, 18, 40, 41, 64)
    ]
    with engine(folder, False, num_blocks, scheduler=MTP, drafts=True) as client:
        client.together(asked)
        client.together(asked)  # with what the prefix cache has
        stats = client.stats_asked_for(1)
        if num_blocks == 48:
            assert stats.scheduler.preemptions > 0
        else:
            assert stats.scheduler.prefix_cache_hits > 0
    assert stats.scheduler.drafts > 100
    reference = ReferenceDrafts(case, folder)
    chosen = [each for each in random.Random(0).sample(drafted, 40) if each.drafts]
    # The entry of a cached block's last token is of the text that filled it.
    assert sum(each.right(reference) for each in chosen) >= 0.9 * len(chosen)


def test_drafts_follow_from_a_prompt_whose_answers_ended_with_its_last_step(
    case: str, folder: Path, drafted: list[Drafted]
) -> None:
    """Prompts are asked for one token of, so that the prefix cache has them for later ones."""
    prompts = [prompt(length) for length in (41, 64, 90)]
    once = SamplingParams(max_tokens=1, seed=1, temperature=0.0)
    later = SamplingParams(max_tokens=20, seed=1, temperature=0.0, ignore_eos=True)
    longer: Asked = [([*tokens, *range(30, 40)], later, ()) for tokens in prompts]
    plain, _ = answered(folder, longer, OFF)
    with engine(folder, False, 160, scheduler=MTP, drafts=True) as client:
        client.together([(tokens, once, range(60, 60 + i)) for i, tokens in enumerate(prompts)])
        got = list(client.together(longer).values())
        assert client.stats_asked_for(1).scheduler.prefix_cache_hits >= 41 + 64 + 90 - 3 * 24
    check_same(got, plain)
    found = [each for each in drafted if each.drafts]
    reference = ReferenceDrafts(case, folder)
    assert sum(each.right(reference) for each in found) >= 0.8 * len(found) > 20


def test_drafts_of_the_model_change_no_answer(folder: Path, plain: list[Answer], drafted: list[Drafted]) -> None:
    asked = asked_together()
    with engine(folder, False, 160, scheduler=MTP, drafts=True) as client:
        got = list(client.together(asked).values())
        counts = client.stats_asked_for(1).scheduler
    check_same(got, plain)
    assert counts.drafts > 100


def test_right_drafts_of_the_model_are_accepted(
    folder: Path, plain: list[Answer], drafted: list[Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_together()
    known = texts(asked, plain)
    put = Speculation.put

    def right(self: Speculation, request: Request, drafts: Sequence[int]) -> None:
        tokens = request.token_ids
        text = next((text for text in known if text[: len(tokens)] == tokens), tokens)
        put(self, request, text[len(tokens) : len(tokens) + len(drafts)])

    monkeypatch.setattr(Speculation, "put", right)
    with engine(folder, False, 160, scheduler=MTP, drafts=True) as client:
        got = list(client.together(asked).values())
        stats = client.stats_asked_for(1)
    check_same(got, plain)
    assert stats.accepted_drafts > 0.6 * stats.scheduler.drafts > 60


@pytest.mark.parametrize(("noise", "wanted"), [(0.0, 1.0), (0.01, 0.35)], ids=["right", "mixed"])
def test_drafts_of_the_model_are_drawn_as_tokens_are(
    tmp_path: Path, drafted: list[Drafted], monkeypatch: pytest.MonkeyPatch, noise: float, wanted: float
) -> None:
    """Where layer and model agree, a draft is right at any temperature. The likeliest tokens are seldom drawn."""
    model = agreeing(save_tiny_drafting("glm4-moe", tmp_path), noise)
    how = SamplingParams(max_tokens=40, seed=0, temperature=0.8, ignore_eos=True)
    filters: tuple[dict[str, Any], ...] = ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02})
    asked: Asked = [
        (prompt(9 + i), msgspec.structs.replace(how, seed=i, **filters[i % len(filters)]), ()) for i in range(12)
    ]
    plain, _ = answered(model, asked, OFF)

    def accepted() -> float:
        with engine(model, False, 160, scheduler=MTP, drafts=True) as client:
            check_same(list(client.together(asked).values()), plain)
            stats = client.stats_asked_for(1)
        assert stats.scheduler.drafts > 300
        return stats.accepted_drafts / stats.scheduler.drafts

    drawn = accepted()
    monkeypatch.setattr(step_loop, "guess", lambda logits, sampling, positions: (logits.argmax(-1), None))
    likeliest = accepted()
    assert drawn >= wanted
    assert drawn > 1.3 * likeliest
