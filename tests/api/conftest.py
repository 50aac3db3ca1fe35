"""Fixtures of the API's tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.config import HttpConfig, ModelConfig, NodeConfig, RequestConfig
from tests.api.node import MODEL, NodeUnderTest, scripted_node


@pytest.fixture(scope="session")
def model_dir(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder that has only the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / MODEL
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_model / name, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture(scope="session")
def node(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeUnderTest]:
    """Yields a node that serves clients directly, and whose engine answers as ``Behaviour`` says."""
    config = NodeConfig(
        model=ModelConfig(served_model_name=MODEL),
        http=HttpConfig(max_body_bytes=100_000),
        request=RequestConfig(timeout_s=60.0),
    )
    with scripted_node(config, model_dir, tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def client(node: NodeUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client
