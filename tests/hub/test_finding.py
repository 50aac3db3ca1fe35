"""Tests what finding a model that is here costs, and the lines of a download."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cli.servers import check_draft_model
from pdserve.config import ModelConfig, SchedulerConfig, Speculate
from pdserve.errors import ConfigError, ModelError
from pdserve.hub.cache import cache_of
from pdserve.hub.download import DownloadProgress, Note, ProgressLines
from pdserve.hub.finding import known_model, with_found_draft_model

PROGRAM = """
import sys
from pdserve.config import ModelConfig
from pdserve.hub.finding import find_model
import pdserve.hub.fetching_node
found = find_model(ModelConfig(path=sys.argv[1]), {"HF_HUB_CACHE": sys.argv[2], "HF_ENDPOINT": "http://127.0.0.1:1"})
print(found.path, found.name, sorted({"huggingface_hub", "httpx2", "torch", "transformers", "rich"} & set(sys.modules)))
"""


def find(model: str, cache: Path) -> str:
    command = [sys.executable, "-P", "-c", PROGRAM, model, str(cache)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_a_model_that_is_here_needs_neither_the_hub_nor_its_library(tiny: Path, tmp_path: Path) -> None:
    assert find(str(tiny), tmp_path) == f"{tiny} {tiny.name} []"
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--tiny--llama" / "snapshots" / commit
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tiny)
    (tmp_path / "models--tiny--llama" / "refs").mkdir()
    (tmp_path / "models--tiny--llama" / "refs" / "main").write_text(commit)
    assert find("tiny/llama", tmp_path) == f"{folder} tiny/llama []"
    assert find(f"tiny/llama@{commit}", tmp_path) == f"{folder} tiny/llama []"


def test_a_draft_model_is_found_as_a_model_is_if_it_is_used(tiny: Path) -> None:
    model, named = ModelConfig(path="demo"), SchedulerConfig(draft_model=str(tiny))
    assert with_found_draft_model(named, model, {}).draft_model == str(tiny)
    nowhere = SchedulerConfig(draft_model="/nowhere")
    with pytest.raises(ModelError, match=r"--draft-model: there is no model '/nowhere'"):
        with_found_draft_model(nowhere, model, {})
    off = replace(nowhere, speculation=Speculate.OFF)
    assert with_found_draft_model(off, model, {}) == off
    check_draft_model(off)
    with pytest.raises(ConfigError, match="--speculation auto alone, which is mtp"):
        check_draft_model(replace(nowhere, speculation=Speculate.MTP))


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_variables_that_name_the_cache(environ: dict[str, str], folder: str) -> None:
    assert cache_of(environ) == Path(folder)


def test_the_lines_of_a_download_tell_share_rate_and_time_left() -> None:
    said: list[str] = []
    times = iter((0.0, 1.0, 10.0, 20.0))
    lines = ProgressLines("org/name", said.append, lambda: next(times))
    lines.take(Note("the hub answers with status 503"))
    for done in (10_000_000, 20_000_000, 110_000_000, 1_000_000_000):
        lines.take(DownloadProgress(done, 1_000_000_000))
    assert said == [
        "the hub answers with status 503",
        "fetching org/name: 1 %, 10 MB of 1.0 GB",
        "fetching org/name: 11 %, 110 MB of 1.0 GB, 10 MB/s, 1 min 29 s left",
        "fetching org/name: 100 %, 1.0 GB of 1.0 GB",
    ]


def test_the_home_of_an_unknown_user_is_no_model_and_no_cache(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        known_model(ModelConfig(path="~nobody-of-this-name/model"), {})
    assert cache_of({"HF_HOME": "~nobody-of-this-name/x"}) == Path("~nobody-of-this-name/x/hub")
