from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attacks.attack import carry_out
from tests.attacks.bodies import heaviest_bodies
from tests.attacks.target import CONTEXT, Target, target
from tests.tiny_models import save_tiny_chat_model

VOCABULARY = 49_152
"""The tokenizer's: what a text becomes has to be in the model."""

AT_ONCE = 4


@pytest.fixture(scope="session")
def attacked(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One cluster for all attacks."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    with target(save_tiny_chat_model(demo_model, folder, **shape)) as running:
        warm_up(running)
        yield running


def warm_up(running: Target) -> None:
    """So that pools have their threads, and malloc what it keeps, before anybody counts."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in pool.map(lambda case: carry_out(running, case), heaviest_bodies() * AT_ONCE):
            assert done is None


@pytest.fixture(scope="module")
def unharmed(attacked: Target) -> Iterator[None]:
    """Around the attacks of one module."""
    with attacked.unharmed():
        yield


@pytest.fixture(scope="module")
def no_prompt_lost(attacked: Target, unharmed: None) -> Iterator[None]:
    """Around the attacks of one module that are none of a transfer's business: every prompt comes over as before."""
    before = attacked.lost_prefills()
    yield
    # The count is one that the engine sends now and then, and certainly when it falls idle.
    attacked.cluster.until_idle()
    assert attacked.lost_prefills() == before
