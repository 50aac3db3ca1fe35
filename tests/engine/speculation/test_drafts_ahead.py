"""Tests that steps are launched ahead where the model drafts nothing, and that it drafts later as if they were not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.engine.request import Request
from pdserve.engine.speculation.guesses import ModelDrafts
from pdserve.engine.speculation.speculation import LEAST_CHANCE, TRIED_EVERY, Speculation
from pdserve.wire.engine import EngineStats
from pdserve.wire.sampling_params import SamplingParams
from tests.engine.speculation.test_draft_model import AUTO, DRAWN, drafting, text_is_not_asked
from tests.engine.speculation.test_drafts import (
    OFF,
    Asked,
    answered,
    asked_together,
    check_same,
)
from tests.engine.speculation.test_model_drafts import COUNT, MTP, noted_drafts
from tests.engine.test_launched_step import MOSTLY, PARAMETERS
from tests.engine.test_step_loop import engine, prompt
from tests.models.tiny_drafting import ReferenceDrafts, save_tiny_drafting
from tests.nightly import nightly
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.integration  # for the seconds that it takes

CASES = ("deepseek-v3", nightly("glm4-moe"))
"""Layers that draft with latents, and with keys and values. Steps of models with states are never launched ahead."""
KINDS: dict[str, dict[str, Any]] = {
    "followed": {"temperature": 0.8},
    "ruled": PARAMETERS["frequency"],
    "needs its last token": PARAMETERS["bad words"] | {"temperature": 0.8},
    "may be refused": MOSTLY,
    "waits for its grammar": PARAMETERS["grammar, top-p"],
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_drafting(case, tmp_path_factory.mktemp("model"))


def now_and_then(self: Speculation, requests: Sequence[Request]) -> int:
    """Has the model draft behind two steps of eight."""
    return COUNT if max(request.num_generated_tokens for request in requests) % 8 >= 6 else 0


def test_drafts_behind_steps_ahead_are_those_of_the_whole_text(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer has seen each token, on whatever device it was when the next step was launched."""
    kinds = ["followed", *KINDS, "followed", "may be refused"]
    asked: Asked = [
        (prompt(5 + 9 * seed), SamplingParams(**{"max_tokens": 40, "seed": seed, "ignore_eos": True} | KINDS[kind]), ())
        for seed, kind in enumerate(kinds)
    ]
    plain, _ = answered(folder, asked, OFF)
    drafted = noted_drafts(monkeypatch)
    monkeypatch.setattr(Speculation, "_model_count", now_and_then)
    with engine(folder, True, 160, scheduler=MTP, drafts=True) as client:
        check_same(list(client.together(asked).values()), plain)
        check_same(list(client.together(asked).values()), plain)  # with what the prefix cache has
        stats = client.stats_asked_for(1)
    assert stats.steps_ahead > 0.4 * stats.steps
    assert stats.scheduler.prefix_cache_hits > 0
    reference = ReferenceDrafts(case, folder)
    for kind in KINDS:
        seeds = [seed for seed, name in enumerate(kinds) if name == kind]
        found = [each for each in drafted if each.drafts and each.sampling.seed in seeds][-15:]
        # The entry of a cached block's last token is of the text that filled it.
        assert sum(each.right(reference) for each in found) >= 0.9 * len(found) > 4, kind


def test_steps_ahead_change_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for; some answers are preempted."""
    asked = asked_together()
    plain, _ = answered(folder, asked, OFF)
    noted_drafts(monkeypatch)
    monkeypatch.setattr(Speculation, "_model_count", now_and_then)
    with engine(folder, True, 64, scheduler=MTP, drafts=True) as client:
        check_same(list(client.together(asked).values()), plain)
        stats = client.stats_asked_for(1)
    assert stats.steps_ahead > 20
    assert stats.scheduler.drafts > 50
    assert stats.scheduler.preemptions > 0


def many() -> Asked:
    """Prompts of several chunks come all the time, more than have places, and one of them needs its tokens."""
    rng, words = random.Random(5), PARAMETERS["bad words"]["bad_words"]
    how = SamplingParams(max_tokens=1, seed=0, temperature=0.8, ignore_eos=True)
    asked: Asked = []
    for seed in range(60):
        tokens, own = prompt(rng.randint(3, 40)), words if seed == 0 else ()
        asked.append(
            (tokens, msgspec.structs.replace(how, max_tokens=rng.randint(5, 30), seed=seed, bad_words=own), ())
        )
    return asked


@pytest.fixture
def in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the model draft nothing but what it tries, and none of that is worth a row."""
    monkeypatch.setattr(Speculation, "_model_count", lambda self, requests: 0)
    monkeypatch.setattr(ModelDrafts, "rate", lambda self, number=0: 0.5 * LEAST_CHANCE)


def check_ahead(stats: EngineStats) -> None:
    assert stats.steps > 4 * TRIED_EVERY
    assert 0.95 * stats.steps <= stats.steps_ahead < stats.steps - stats.steps // TRIED_EVERY
    assert stats.scheduler.drafts == 0


@pytest.mark.usefixtures("in_vain")
def test_nearly_all_steps_of_a_saturated_engine_are_launched_ahead_while_nothing_is_drafted(folder: Path) -> None:
    asked = many()
    plain, _ = answered(folder, asked, OFF)
    with engine(
        folder, True, 150, scheduler=replace(MTP, max_num_seqs=8, max_num_batched_tokens=16), drafts=True
    ) as client:
        check_same(list(client.together(asked).values()), plain)
        check_ahead(client.stats_asked_for(1))


@pytest.mark.usefixtures("in_vain")
def test_a_draft_model_that_drafts_nothing_keeps_no_step_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_is_not_asked(monkeypatch)
    folder, asked = save_tiny_model("llama", tmp_path), many()
    plain, _ = answered(folder, asked, OFF)
    model = drafting(folder)
    with engine(
        folder, True, 150, scheduler=replace(AUTO, max_num_seqs=8, max_num_batched_tokens=16), draft_model=model
    ) as client:
        check_same(list(client.together(asked).values()), plain)
        check_ahead(client.stats_asked_for(1))
    assert model.num_free == 160


def test_a_draft_model_drafts_behind_steps_ahead_as_it_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is the model is always right: so it has read each token."""
    text_is_not_asked(monkeypatch)
    noted_drafts(monkeypatch)
    monkeypatch.setattr(Speculation, "_model_count", now_and_then)
    folder, model = save_tiny_model("llama", tmp_path), drafting(save_tiny_model("llama", tmp_path / "same"))
    plain, _ = answered(folder, DRAWN, OFF)
    with engine(folder, True, 160, scheduler=AUTO, draft_model=model) as client:
        check_same(list(client.together(DRAWN).values()), plain)
        stats = client.stats_asked_for(1)
    assert stats.steps_ahead > 0.3 * stats.steps
    assert stats.scheduler.drafts == stats.accepted_drafts > 10
    assert model.num_free == 160
