"""Tests that a turn of the fake engine makes the calls of a turn of the step loop, in their order.

Many tests drive the real scheduler, blocks and connectors by the fake engine. What they show holds for the product only
as long as nothing comes between two calls there that does not come between them here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.connector import NoTransferConnector
from pdserve.engine.sampling.grammar_opener import GrammarOpener
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.models.runner import ModelRunner
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.engine.fake_engine import FakeEngine, FakeGrammars
from tests.engine.fake_model import FakeModel, talkative
from tests.engine.test_step_loop import Client, engine, prompt
from tests.tiny_models import save_tiny_model

CALLS: dict[str, list[tuple[type, str]]] = {
    "poll": [(NoTransferConnector, "poll")],
    "expired": [(Scheduler, "expired")],
    "grammars": [(GrammarOpener, "take"), (FakeGrammars, "take")],
    "give up": [(NoTransferConnector, "give_up")],
    "finish": [(Scheduler, "finish")],
    "schedule": [(Scheduler, "schedule")],
    "copy": [(ModelRunner, "copy_blocks"), (FakeModel, "copy")],
    "start": [(NoTransferConnector, "start")],
    "compute": [(ModelRunner, "run"), (FakeModel, "run")],
    "schedule ahead": [(Scheduler, "schedule_ahead")],
    "scored": [(Scheduler, "scored")],
    "postprocess": [(Scheduler, "postprocess")],
    "stepped": [(NoTransferConnector, "stepped")],
    "clean": [(BlockManager, "clean")],
}
"""What a turn may call, and where that is found in the product and in the fake engine."""
FIRST = "poll"
MAX_TOKENS = 6

Turns = set[tuple[str, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the names of calls, one of several that follow each other."""
    made: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_call(*args: Any, **more: Any) -> Any:
            if made[-1:] != [name]:
                made.append(name)
            return call(*args, **more)

        return note_and_call

    for name, places in CALLS.items():
        for owner, method in places:
            monkeypatch.setattr(owner, method, noting(name, getattr(owner, method)))
    return made


def turns(calls: list[str]) -> Turns:
    starts = [i for i, name in enumerate(calls) if name == FIRST]
    return {tuple(calls[i:j]) for i, j in zip(starts, [*starts[1:], len(calls)], strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def ask_real(client: Client) -> None:
    """Has the step loop serve the requests of ``ask_fake``."""
    plain = SamplingParams(max_tokens=MAX_TOKENS, seed=1, ignore_eos=True)
    refused = SamplingParams(max_tokens=MAX_TOKENS, seed=1, grammar=Grammar(GrammarKind.REGEX, "("))
    scored = SamplingParams(max_tokens=MAX_TOKENS, seed=1, ignore_eos=True, prompt_logprobs=0)
    client.together([(prompt(10), plain, [2, 3])])
    client.together([(prompt(10), scored, [])])
    client.together([(prompt(10), refused, [])])
    client.together([(prompt(10), plain, [])], deadline_s=1e-9)


def ask_fake(fake: FakeEngine) -> None:
    ids = [30] * 10
    seed = talkative(ids, MAX_TOKENS)
    fake.add(1, ids, MAX_TOKENS, [seed] * 3)
    fake.run()
    fake.add(4, ids, MAX_TOKENS, [seed], scored=True)
    fake.run()
    fake.grammars.refused.append((fake.add(5, ids, MAX_TOKENS, [seed]), "no"))
    fake.run()
    fake.add(6, ids, MAX_TOKENS, [seed], deadline_s=0)
    fake.run()


@pytest.mark.parametrize("overlap", [False, True], ids=["one after another", "ahead"])
def test_a_turn_of_the_fake_engine_is_one_of_the_step_loop(folder: Path, calls: list[str], overlap: bool) -> None:
    with engine(folder, overlap) as client:
        ask_real(client)
    real = turns(calls)
    calls.clear()
    ask_fake(FakeEngine(overlap=overlap))
    assert turns(calls) == real
    seen = {name for turn in real for name in turn}
    assert seen == CALLS.keys() if overlap else seen == CALLS.keys() - {"schedule ahead"}
