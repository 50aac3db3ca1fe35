"""A hub on this machine, with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.fake_hub import FakeHub, Repository, fake_hub
from tests.tiny_models import save_tiny_model
from tests.tiny_vocabulary import save_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a whole model, and with what nobody serves."""
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("hub") / "tiny")
    save_tiny_tokenizer(folder)
    (folder / "README.md").write_text("A model.\n")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    return folder


@pytest.fixture
def hub(tiny: Path) -> Iterator[FakeHub]:
    """Yields a hub with the model ``tiny/llama``."""
    with fake_hub() as running:
        running.repositories["tiny/llama"] = Repository({"main": tiny})
        yield running
