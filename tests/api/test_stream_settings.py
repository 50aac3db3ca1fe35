"""Tests that each setting of the streaming path takes effect inside a node."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.api.answers.answer import FullChunks, PlainChunks
from pdserve.api.generation.engine_client import EngineClient, PromptChoices
from pdserve.api.generation.generation import ReadPace
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.config import HttpConfig, StreamConfig, Switch
from pdserve.wire.terms import Terms
from tests.api.behaviour import Behaviour
from tests.api.node import MODEL
from tests.api.plain_http import post
from tests.api.test_disconnect import app_in_process
from tests.http.http_serving import http_serving

pytestmark = pytest.mark.integration

BODY = {"model": MODEL, "prompt": "x", "seed": Behaviour.BURST, "stream": True}


async def ask(settings: StreamConfig, body: dict[str, Any], model_dir: Path, tokenizer: Tokenizer, folder: Path) -> str:
    """Returns the answer of a node with these settings."""

    async with (
        app_in_process(model_dir, tokenizer, folder / "journal", settings) as (app, _),
        http_serving(app, HttpConfig()) as (host, port),
    ):
        answer = await asyncio.to_thread(post, f"http://{host}:{port}/v1/completions", body)
        assert answer.status == 200
        return answer.text


@pytest.mark.parametrize(
    ("switch", "extra", "way"),
    [
        (Switch.ON, {}, "PlainChunks"),
        (Switch.ON, {"stream_options": {"include_usage": True}}, "PlainChunks"),
        (Switch.OFF, {}, "FullChunks"),
        (Switch.ON, {"logprobs": 1}, "FullChunks"),
    ],
)
async def test_chunks_take_the_way_that_the_setting_says(
    switch: Switch,
    extra: dict[str, Any],
    way: str,
    model_dir: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways give the same bytes, so the test counts which way each chunk takes."""
    taken: Counter[str] = Counter()
    for made in (PlainChunks, FullChunks):
        plain = made.text

        def counted(self: Any, delta: Any, plain: Any = plain, name: str = made.__name__) -> bytes:
            taken[name] += 1
            return bytes(plain(self, delta))

        monkeypatch.setattr(made, "text", counted)
    text = await ask(StreamConfig(fast_path=switch), {**BODY, **extra}, model_dir, tokenizer, tmp_path)
    assert text.endswith("data: [DONE]\n\n")
    assert list(taken) == [way]


@pytest.mark.parametrize(
    ("setting", "asked", "interval"),
    [(1, None, 1), (1, 7, 7), (10, None, 10), (10, 1, 1), (10, 25, 25), (10, 10, 10)],
)
async def test_a_requests_own_interval_counts_before_the_nodes(
    setting: int,
    asked: int | None,
    interval: int,
    model_dir: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []
    original = EngineClient.open

    def opened(self: EngineClient, prompts: Sequence[PromptChoices], terms: Terms, pace: ReadPace) -> Any:
        found.append(pace.interval)
        return original(self, prompts, terms, pace)

    monkeypatch.setattr(EngineClient, "open", opened)
    body = BODY if asked is None else {**BODY, "stream_interval": asked}
    await ask(StreamConfig(interval=setting), body, model_dir, tokenizer, tmp_path)
    assert found == [interval]
