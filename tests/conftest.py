"""Fixtures for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.models.demo import demo_model_dir
from pdserve.settings import cache_folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; converted once into the user's cache, as ``pdserve up`` would."""
    return demo_model_dir(cache_folder(os.environ))
