from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.target import CONTEXT, Target, target
from tests.tiny_models import save_tiny_chat_model

VOCABULARY = 49_152
"""The tokenizer's: what a text becomes has to be in the model."""


@pytest.fixture(scope="session")
def attacked(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One cluster for all attacks."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    with target(save_tiny_chat_model(demo_model, folder, **shape)) as running:
        yield running


@pytest.fixture(scope="module")
def unharmed(attacked: Target) -> Iterator[None]:
    """Around the attacks of one module."""
    with attacked.unharmed():
        yield
