"""Serves models by their names, in real processes, from a hub on this machine."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pdserve.process import free_port
from tests.hub.fake_hub import FakeHub
from tests.processes import pdserve

pytestmark = pytest.mark.integration

WEIGHTS = "model.safetensors"
SMALL = ("--kv-cache-mib", "8", "--dtype", "float32", "--device", "cpu")


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def ask(url: str, model: str) -> tuple[int, Any]:
    body = json.dumps({"model": model, "prompt": "ab", "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_serve_fetches_once_and_serves_under_the_name_as_given(hub: FakeHub, tmp_path: Path) -> None:
    argv = ("serve", "tiny/llama@main", "--port", "0", "--prefill", "0", "--decode", "0", "--mixed", "2", *SMALL)
    with pdserve(*argv, **hub.environ(tmp_path)) as cluster:
        line = cluster.wait_for(lambda line: "OpenAI-compatible API:" in line)
        url = line.split()[-1].removesuffix("/v1")
        assert "fetching tiny/llama: 100 %" in cluster.output
        status, models = get(f"{url}/v1/models")
        assert (status, [model["id"] for model in models["data"]]) == (200, ["tiny/llama"])
        assert ask(url, "tiny/llama")[0] == 200
        status, body = ask(url, "gpt-4o")
        assert status == 404
        assert body["error"]["message"] == "the model 'gpt-4o' does not exist here; here is 'tiny/llama'"
        cluster.terminate()
        assert cluster.wait(60) == 0
    assert len(hub.fetched(WEIGHTS)) == 2  # the hub's redirect, and the store


def test_a_node_that_fetches_lives_and_says_how_far_it_is(hub: FakeHub, tmp_path: Path) -> None:
    hub.hold_at[WEIGHTS] = 200_000
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with pdserve("mixed", "tiny/llama", "--port", str(port), *SMALL, **hub.environ(tmp_path)) as node:
        assert hub.held.wait(60)
        node.wait_for(lambda line: "fetching tiny/llama: " in line)
        status, body = get(f"{url}/ready")
        assert status == 503
        assert body["status"].startswith("downloading ") and body["status"].endswith(" %")
        assert body["reason"] == "the model tiny/llama is being fetched"
        assert get(f"{url}/live") == (200, {"status": "live"})
        assert ask(url, "tiny/llama")[0] == 503
        hub.let_go.set()
        assert node.listening().url == url
        assert get(f"{url}/ready") == (200, {"status": "ready"})
        status, body = ask(url, "gpt-4o")
        assert (status, body["error"]["message"]) == (
            404,
            "the model 'gpt-4o' does not exist here; here is 'tiny/llama'",
        )


def test_a_node_that_is_stopped_while_it_fetches_ends_at_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.hold_at[WEIGHTS] = 100_000
    with pdserve("decode", "tiny/llama", **hub.environ(tmp_path)) as node:
        assert hub.held.wait(60)
        node.terminate()
        assert node.wait() == 0


@pytest.mark.parametrize("linked", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_folder_of_the_cache_and_a_link_keep_their_names(
    hub: FakeHub, tiny: Path, tmp_path: Path, linked: bool
) -> None:
    commit = hub.repositories["tiny/llama"].commit("main")
    folder = tmp_path / "models--tiny--llama" / "snapshots" / commit
    shutil.copytree(tiny, folder)
    (tmp_path / "current").symlink_to(folder)
    given = tmp_path / "current" if linked else folder
    with pdserve("mixed", str(given), *SMALL) as node:
        url = node.listening().url
        assert get(f"{url}/v1/models")[1]["data"][0]["id"] == ("current" if linked else "tiny/llama")
