"""Tests that an engine has the model draft what it would draft of the whole text, and that no answer depends on it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.config import SchedulerConfig, Speculate
from pdserve.engine.request import Request
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
from tests.models.tiny_drafting import ReferenceDrafts, save_tiny_drafting
from tests.nightly import nightly

pytestmark = pytest.mark.integration  # for the seconds that it takes

COUNT = 3
MTP = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=96, speculation=Speculate.MTP, draft_tokens=COUNT)
CASES = ("deepseek-v3", nightly("glm4-moe"), "qwen3-next")
"""Layers that draft with latents, and with keys and values: behind others like them, and behind states."""

Drafted = list[tuple[list[int], list[int]]]


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
def drafted(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """Has each step draft as much as it may, and returns the texts and the drafts of what follows them."""
    found: Drafted = []
    put = Speculation.put

    def noted(self: Speculation, request: Request, drafts: Sequence[int]) -> None:
        found.append((list(request.token_ids), list(drafts)))
        put(self, request, drafts)

    monkeypatch.setattr(Speculation, "put", noted)
    monkeypatch.setattr(Speculation, "_counts", as_many_as_there_are)
    monkeypatch.setattr(Speculation, "_model_count", lambda self, requests: COUNT)
    monkeypatch.setattr(ModelDrafts, "rate", lambda self, number=0: 0.9)
    return found


@pytest.mark.parametrize("num_blocks", [160, 48], ids=["roomy", "tight"])
def test_drafts_are_those_of_the_whole_text(case: str, folder: Path, drafted: Drafted, num_blocks: int) -> None:
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
    chosen = random.Random(0).sample(drafted, 40)
    right = sum(reference.drafts(text, len(drafts)) == drafts for text, drafts in chosen if drafts)
    # The entry of a cached block's last token is of the text that filled it.
    assert right >= 0.9 * sum(bool(drafts) for _, drafts in chosen)


def test_drafts_follow_from_a_prompt_whose_answers_ended_with_its_last_step(
    case: str, folder: Path, drafted: Drafted
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
    found = [(text, drafts) for text, drafts in drafted if drafts]
    reference = ReferenceDrafts(case, folder)
    right = sum(reference.drafts(text, len(drafts)) == drafts for text, drafts in found)
    assert right >= 0.8 * len(found) > 20


def test_drafts_of_the_model_change_no_answer(folder: Path, plain: list[Answer], drafted: Drafted) -> None:
    asked = asked_together()
    with engine(folder, False, 160, scheduler=MTP, drafts=True) as client:
        got = list(client.together(asked).values())
        counts = client.stats_asked_for(1).scheduler
    check_same(got, plain)
    assert counts.drafts > 100


def test_right_drafts_of_the_model_are_accepted(
    folder: Path, plain: list[Answer], drafted: Drafted, monkeypatch: pytest.MonkeyPatch
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
