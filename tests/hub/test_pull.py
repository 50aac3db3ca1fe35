"""Runs ``pdserve pull`` and ``pdserve models`` against a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download, scan_cache_dir

from pdserve.hub.cache import PARTIAL
from pdserve.models.served import served_families
from pdserve.process import python_program
from tests.cli import in_process
from tests.eventually import eventually
from tests.forks import Forks, forks_of
from tests.hub.fake_hub import FakeHub, Repository
from tests.nightly import nightly
from tests.processes import clean_environ, pdserve
from tests.tiny_gguf import save_tiny_gguf

pytestmark = pytest.mark.integration

WEIGHTS = "model.safetensors"
TOKEN = "hf_of_the_tests"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Yields what starts processes that fetch models, and ``pdserve models``."""
    with forks_of(
        "pdserve.cli.main", "pdserve.cli.models", "pdserve.hub.selection", "huggingface_hub.hf_api"
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _forked(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has models fetched by forks. What the tests start by ``pdserve`` fetches them as it always does."""
    monkeypatch.setattr("pdserve.hub.finding.python_program", forks.command)
    monkeypatch.setattr(f"{__name__}.python_program", forks.command)


def call(environ: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a command, in this process where huggingface_hub, which reads its environment once, is loaded by another."""
    if argv[0] != "models":
        return in_process.call(*argv, **environ)
    return subprocess.run(
        python_program("pdserve", *argv),
        env=clean_environ(**environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(environ: dict[str, str], *argv: str) -> str:
    """Returns the one line that the command fails with."""
    done = call(environ, *argv)
    assert done.returncode in (1, 2), done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"pdserve {argv[0]}: ")
    return last


def pulled(environ: dict[str, str], model: str) -> Path:
    done = call(environ, "pull", model)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def tiny_with(hub: FakeHub, tiny: Path, tmp_path: Path) -> Path:
    """Returns a copy of the tiny model, which the hub has in place of it, to be changed by a test."""
    folder = Path(shutil.copytree(tiny, tmp_path / "changed"))
    hub.repositories["tiny/llama"] = Repository({"main": folder})
    return folder


def test_it_fetches_what_is_served_and_no_more(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    folder = pulled(hub.environ(tmp_path), "tiny/llama")
    commit = hub.repositories["tiny/llama"].commit("main")
    assert folder == tmp_path / "models--tiny--llama" / "snapshots" / commit
    for file in folder.iterdir():
        assert file.read_bytes() == (tiny / file.name).read_bytes()
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS}
    assert {file.name for file in folder.iterdir()} == wanted & {file.name for file in tiny.iterdir()}
    assert not hub.fetched("README.md") and not hub.fetched(".bin")


def test_huggingface_hub_finds_in_the_cache_what_pdserve_has_put_there(hub: FakeHub, tmp_path: Path) -> None:
    folder = pulled(hub.environ(tmp_path), "tiny/llama")
    (repository,) = scan_cache_dir(tmp_path).repos
    (revision,) = repository.revisions
    assert (repository.repo_id, set(revision.refs)) == ("tiny/llama", {"main"})
    assert Path(hf_hub_download("tiny/llama", WEIGHTS, cache_dir=tmp_path, local_files_only=True)) == folder / WEIGHTS


def test_a_second_pull_fetches_nothing_and_a_new_revision_only_what_changed(
    hub: FakeHub, tiny_with: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = pulled(hub.environ(cache), "tiny/llama")
    assert pulled(hub.environ(cache), "tiny/llama") == first
    assert len(hub.fetched(WEIGHTS)) == 2  # the hub's redirect, and the store
    newer = Path(shutil.copytree(tiny_with, tmp_path / "newer"))
    (newer / "generation_config.json").write_text('{"eos_token_id": 2}')
    hub.repositories["tiny/llama"].revisions = {"main": newer}
    second = pulled(hub.environ(cache), "tiny/llama")
    assert second != first
    assert (second / "generation_config.json").read_text() == '{"eos_token_id": 2}'
    assert len(hub.fetched(WEIGHTS)) == 2


def test_a_broken_connection_is_taken_up_where_it_broke(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    hub.breaks[WEIGHTS].extend([100_000, 0, 50_000])
    folder = pulled(hub.environ(tmp_path), "tiny/llama")
    assert (folder / WEIGHTS).read_bytes() == (tiny / WEIGHTS).read_bytes()
    starts = [each.first for each in hub.fetched(str(tiny / WEIGHTS))]
    assert len(starts) == 4
    assert starts[0] == 0 < starts[1] == starts[2] < starts[3]


def test_a_killed_download_goes_on_where_it_was(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    environ = hub.environ(tmp_path)
    hub.hold_at[WEIGHTS] = 1_200_000
    hub.repositories["tiny/llama"].revisions = {"main": larger(tiny, tmp_path / "larger")}
    with pdserve("pull", "tiny/llama", **environ) as pull:
        assert hub.held.wait(60)
        eventually(lambda: sum(file.stat().st_size for file in tmp_path.rglob(f"*{PARTIAL}")), "some of it is stored")
        pull.popen.kill()
        pull.wait()
    hub.hold_at.clear()
    hub.let_go.set()
    folder = pulled(environ, "tiny/llama")
    assert hub.fetched(WEIGHTS)[-1].first > 0
    assert (folder / WEIGHTS).read_bytes() == (tmp_path / "larger" / WEIGHTS).read_bytes()


def larger(tiny: Path, folder: Path) -> Path:
    """Saves the tiny model with weights of more than 3 MB: a second tensor that no model reads."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny, folder)
    save_file(load_file(folder / WEIGHTS) | {"more": torch.ones(800_000)}, folder / WEIGHTS)
    return folder


def test_two_processes_fetch_a_model_once(hub: FakeHub, tmp_path: Path) -> None:
    environ = hub.environ(tmp_path)
    hub.hold_at[WEIGHTS] = 100_000
    with pdserve("pull", "tiny/llama", **environ) as first, pdserve("pull", "tiny/llama", **environ) as second:
        either = [first, second]
        assert hub.held.wait(60)
        waiting = next(each for each in either if waits(each))
        hub.let_go.set()
        assert [each.wait(60) for each in either] == [0, 0]
        assert "nothing was to fetch" in waiting.output
    assert len(hub.fetched(WEIGHTS)) == 2


def waits(process: object) -> bool:
    from tests.processes import Process

    assert isinstance(process, Process)
    try:
        process.wait_for(lambda line: "another process fetches tiny/llama" in line, 10)
    except AssertionError:
        return False
    return True


def test_bytes_that_are_not_the_hubs_are_refused_and_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.spoilt.add(WEIGHTS)
    assert "its digest is wrong" in refused(hub.environ(tmp_path), "pull", "tiny/llama")
    assert not list(tmp_path.rglob(WEIGHTS)) and not list(tmp_path.rglob("*.partial"))
    hub.spoilt.clear()
    assert (pulled(hub.environ(tmp_path), "tiny/llama") / WEIGHTS).is_file()


def test_a_spoilt_configuration_is_refused_too(hub: FakeHub, tmp_path: Path) -> None:
    hub.spoilt.add("config.json")
    assert "tiny/llama/config.json did not come as the hub has it" in refused(
        hub.environ(tmp_path), "pull", "tiny/llama"
    )


def test_the_token_goes_to_the_hub_alone(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    hub.repositories["tiny/llama"].token = TOKEN
    without = refused(hub.environ(tmp_path), "pull", "tiny/llama")
    assert "the hub has no model tiny/llama, or it is private: check the name, or give a token in HF_TOKEN" in without
    wrong = refused(hub.environ(tmp_path, HF_TOKEN="hf_another"), "pull", "tiny/llama")
    assert "or your token may not read it" in wrong and "hf_another" not in wrong
    pulled(hub.environ(tmp_path, HF_TOKEN=TOKEN), "tiny/llama")
    (from_store,) = hub.fetched(str(tiny / WEIGHTS))
    assert from_store.token == ""


def test_a_gated_model_says_where_its_terms_are(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["tiny/llama"].accepted = False
    said = refused(hub.environ(tmp_path), "pull", "tiny/llama")
    assert f"accept its terms at {hub.url}/tiny/llama" in said and "HF_TOKEN" in said
    assert "has not been given access" in refused(hub.environ(tmp_path, HF_TOKEN=TOKEN), "pull", "tiny/llama")
    assert not hub.fetched(WEIGHTS)


def test_an_unknown_revision(hub: FakeHub, tmp_path: Path) -> None:
    assert "tiny/llama has no revision 'v9'" in refused(hub.environ(tmp_path), "pull", "tiny/llama@v9")


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_with_too_much_to_do_is_asked_again(hub: FakeHub, tmp_path: Path, status: int) -> None:
    hub.statuses.extend([(status, {"retry-after": "0"})] * 2)
    done = call(hub.environ(tmp_path), "pull", "tiny/llama")
    assert done.returncode == 0
    assert f"the hub answers with status {status}; it is asked again in 0 s" in done.stderr
    hub.statuses.extend([(status, {"retry-after": "0"})] * 20)
    words = {429: "takes no more requests from here for now (429)", 503: "the hub answers with status 503; try again"}
    assert words[status] in refused(hub.environ(tmp_path), "pull", "tiny/llama")


def test_without_a_network_a_name_fails_in_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        environ = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": ""}
        for command in ("pull", "serve", "mixed", "models"):
            said = refused(environ, command, "foo/bar")
            assert f"the hub at {url} cannot be reached" in said and "pdserve models" in said


def test_offline_a_model_comes_from_the_cache_alone(hub: FakeHub, tmp_path: Path) -> None:
    environ = hub.environ(tmp_path)
    assert "the cache has no complete model" in refused(environ, "pull", "tiny/llama", "--offline")
    folder = pulled(environ, "tiny/llama")
    asked = len(hub.requests)
    done = call(environ, "pull", "--offline", "tiny/llama")
    assert (done.returncode, done.stdout.strip()) == (0, str(folder))
    said = refused(environ | {"HF_HUB_OFFLINE": "1"}, "serve", "other/model")
    assert "other/model is not in the cache" in said and "the cache has tiny/llama" in said
    assert len(hub.requests) == asked


def test_too_small_a_disk_is_said_before_anything_large_is_fetched(
    hub: FakeHub, tiny_with: Path, tmp_path: Path
) -> None:
    size = shutil.disk_usage(tmp_path).total
    hub.repositories["tiny/llama"].sizes[WEIGHTS] = min(size + 1, 49 * 10**9) if size < 49 * 10**9 else size
    said = refused(hub.environ(tmp_path / "cache"), "pull", "tiny/llama")
    assert "are free; free some, or name another folder in HF_HOME" in said or "to its own program only" in said
    before = refused(hub.environ(tmp_path / "cache"), "models", "tiny/llama")
    assert before.removeprefix("pdserve models: ") == said.removeprefix("pdserve pull: ")
    assert not hub.fetched(WEIGHTS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        nightly({"model_type": "rwkv"}, "states are not served yet"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "are quantised (config.json: aqlm)"),
    ],
)
def test_what_the_configuration_rules_out_is_refused_before_the_weights_come(
    hub: FakeHub, tiny_with: Path, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    path = tiny_with / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    environ = hub.environ(tmp_path / "cache")
    for command in ("pull", "serve"):
        said = refused(environ, command, "tiny/llama")
        assert message in said
        assert str(tmp_path) not in said
    done = call(environ, "models", "tiny/llama")
    assert done.returncode == 1
    assert message in done.stdout
    assert not hub.fetched(WEIGHTS)


def test_formats_that_the_hub_tells_are_refused_before_the_weights_come(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["tiny/llama"].more = {"safetensors": {"parameters": {"BF16": 9, "F8_E4M3": 9}, "total": 18}}
    assert "its weights are in F8_E4M3" in refused(hub.environ(tmp_path), "pull", "tiny/llama")
    assert not hub.fetched(WEIGHTS)


def test_formats_that_the_configuration_explains_are_fetched(hub: FakeHub, tiny_with: Path, tmp_path: Path) -> None:
    hub.repositories["tiny/llama"].more = {"safetensors": {"parameters": {"BF16": 9, "F8_E4M3": 9}, "total": 18}}
    path = tiny_with / "config.json"
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    assert call(hub.environ(tmp_path / "cache"), "pull", "tiny/llama").returncode == 0
    assert hub.fetched(WEIGHTS)


@pytest.fixture
def gguf_repository(hub: FakeHub, tiny: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "gguf"
    folder.mkdir()
    for label in ("F32", "Q8_0"):
        save_tiny_gguf(tiny, folder / f"tiny-{label}.gguf", {"general.quantized_by": label})
    hub.repositories["tiny/gguf"] = Repository({"main": folder})
    return folder


def test_one_gguf_file_of_several(hub: FakeHub, gguf_repository: Path, tmp_path: Path) -> None:
    environ = hub.environ(tmp_path / "cache")
    said = refused(environ, "pull", "tiny/gguf")
    assert "say which one as tiny/gguf:QUANTISATION, of F32, Q8_0" in said
    file = pulled(environ, "tiny/gguf:q8_0")
    assert file.name == "tiny-Q8_0.gguf"
    assert file.read_bytes() == (gguf_repository / file.name).read_bytes()
    assert pulled(environ, "tiny/gguf/tiny-F32.gguf").name == "tiny-F32.gguf"
    done = call(environ, "models")
    assert "tiny/gguf:Q8_0" in done.stdout and "tiny/gguf:F32" in done.stdout


def test_a_gguf_file_in_parts_is_fetched_whole(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    save_tiny_gguf(tiny, folder / "tiny-F32.gguf", split=12)
    names = sorted(file.name for file in folder.iterdir())
    assert len(names) > 2
    hub.repositories["tiny/gguf"] = Repository({"main": folder})
    environ = hub.environ(tmp_path / "cache")
    file = pulled(environ, "tiny/gguf:F32")
    assert sorted(each.name for each in file.parent.iterdir()) == names
    assert file.name == names[0]
    hub.requests.clear()
    assert pulled(environ, f"tiny/gguf/{names[1]}") == file
    row = call(environ, "models").stdout.splitlines()[1]
    assert row.split()[0] == "tiny/gguf:F32" and row.split()[-2:] == ["main", "yes"]
    (file.parent / names[2]).unlink()
    assert pulled(environ, "tiny/gguf:F32") == file
    assert (file.parent / names[2]).is_file()


def test_an_architecture_that_is_not_served_is_refused_before_the_file_comes(
    hub: FakeHub, gguf_repository: Path, tmp_path: Path
) -> None:
    hub.repositories["tiny/gguf"].more = {"gguf": {"architecture": "rwkv7"}}
    assert "a model of architecture 'rwkv7'" in refused(hub.environ(tmp_path / "cache"), "pull", "tiny/gguf:Q8_0")
    assert not hub.fetched(".gguf")


def test_a_mirror_that_says_no_digests_is_asked_file_by_file(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["tiny/llama"].bare = True
    assert (pulled(hub.environ(tmp_path), "tiny/llama") / WEIGHTS).is_file()
    assert any(each.method == "HEAD" for each in hub.requests)


def test_the_models_of_the_cache_and_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    environ = hub.environ(tmp_path)
    done = call(environ, "models", "tiny/llama")
    assert done.returncode == 0
    assert "tiny/llama can be served here; " in done.stdout and "are to fetch: pdserve pull tiny/llama" in done.stdout
    assert not hub.fetched(WEIGHTS)
    assert "not all of it is here: pdserve pull tiny/llama" in call(environ, "models").stdout
    pulled(environ, "tiny/llama")
    head, row = call(environ, "models").stdout.splitlines()
    assert head.split()[:3] == ["MODEL", "SIZE", "REVISION"]
    assert row.split()[0] == "tiny/llama" and row.split()[-2:] == ["main", "yes"]
    assert f"it is in {tmp_path}" in call(environ, "models", "tiny/llama").stdout


def test_what_is_listed_as_json(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    environ = hub.environ(tmp_path)
    said = json.loads(call(environ, "models", "tiny/llama", "--json").stdout)
    assert (said["model"], said["served"], said["reason"], said["path"]) == ("tiny/llama", True, "", "")
    assert said["bytes_to_fetch"] == (tiny / WEIGHTS).stat().st_size
    folder = pulled(environ, "tiny/llama")
    said = json.loads(call(environ, "models", "tiny/llama", "--json").stdout)
    assert (said["path"], said["bytes_to_fetch"]) == (str(folder), 0)
    said = json.loads(call(environ, "models", "--json").stdout)
    (row,) = said["models"]
    assert (row["model"], row["served"], row["reason"]) == ("tiny/llama", True, "")
    assert {family["model_type"] for family in said["families"]} == {family.model_type for family in served_families()}
    assert "mistral3" in said["text_parts_of"]
    assert said["not_yet"]["rwkv"] == "states"
    hub.repositories["tiny/llama"].more = {"safetensors": {"parameters": {"F8_E4M3": 9}, "total": 9}}
    done = call(hub.environ(tmp_path / "empty"), "models", "tiny/llama", "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 1 and not said["served"] and "F8_E4M3" in said["reason"]


def test_the_families_that_can_be_served(hub: FakeHub, tmp_path: Path) -> None:
    lines = call(hub.environ(tmp_path), "models", "--families").stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {"FAMILY", *(family.model_type for family in served_families())}
    (line,) = (line for line in lines if line.startswith("not yet: states"))
    assert "rwkv" in line


def test_a_path_that_exists_wins_over_the_hub(hub: FakeHub, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "tiny" / "llama")
    before = os.getcwd()
    try:
        os.chdir(tmp_path)
        assert pulled(hub.environ(tmp_path / "cache"), "tiny/llama") == tmp_path / "tiny" / "llama"
        for path in ("./tiny/other", "tiny/llama/other", "/tiny/llama"):
            assert f"there is no model {path!r}" in refused(hub.environ(tmp_path / "cache"), "pull", path)
    finally:
        os.chdir(before)
    assert hub.requests == []


def test_a_model_given_twice_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    said = refused(hub.environ(tmp_path), "serve", "tiny/llama", "--model", "demo")
    assert "the model is given twice: 'tiny/llama', and --model 'demo'" in said
    assert "unexpected argument 'other'" in refused(hub.environ(tmp_path), "serve", "tiny/llama", "other")


def test_settings_that_are_not_served_are_found_in_the_first_bytes_of_a_gguf_file(
    hub: FakeHub, tiny: Path, gguf_repository: Path, tmp_path: Path
) -> None:
    save_tiny_gguf(tiny, gguf_repository / "tiny-Q8_0.gguf", {"llama.final_logit_softcapping": 30.0})
    said = refused(hub.environ(tmp_path / "cache"), "pull", "tiny/gguf:Q8_0")
    assert "tiny/gguf:Q8_0 cannot be served: tiny/gguf has settings that are not supported: llama.final_logit" in said


def test_files_that_are_alike_are_fetched_once(hub: FakeHub, tiny_with: Path, tmp_path: Path) -> None:
    for name in ("first.json", "second.json"):
        (tiny_with / name).write_text('{"alike": true}')
    folder = pulled(hub.environ(tmp_path / "cache"), "tiny/llama")
    assert (folder / "first.json").read_bytes() == (folder / "second.json").read_bytes()
    assert len(hub.fetched("first.json") + hub.fetched("second.json")) == 1


@pytest.mark.parametrize(
    "more",
    [{"siblings": [1]}, {"siblings": [{}]}, {"sha": 5}, {"sha": "main"}, {"safetensors": [1]}, {"gguf": [1]}],
    ids=json.dumps,
)
def test_an_answer_that_is_no_hubs_is_told_in_one_sentence(
    hub: FakeHub, tmp_path: Path, more: dict[str, object]
) -> None:
    hub.repositories["tiny/llama"].more = more
    assert f"{hub.url} does not answer as a hub of models does" in refused(hub.environ(tmp_path), "pull", "tiny/llama")


def test_the_hub_is_told_nothing_of_this_machines_variables(hub: FakeHub, tmp_path: Path) -> None:
    """huggingface_hub would ask which to look for, and keep an answer that is none."""
    pulled(hub.environ(tmp_path, HF_HOME=str(tmp_path / "home")), "tiny/llama")
    assert not [each for each in hub.requests if "agent" in each.path]


def test_names_that_would_change_the_terminal_are_no_files_of_a_model(hub: FakeHub, tmp_path: Path) -> None:
    files = [
        {"rfilename": name, "size": 5, "blobId": "a" * 40} for name in ("a\x1b]0;b\x07.gguf", "c\n.gguf", "d\0.gguf")
    ]
    hub.repositories["tiny/llama"].more = {"siblings": files}
    assert "it has no weights" in refused(hub.environ(tmp_path), "pull", "tiny/llama")


def test_formats_that_would_change_the_terminal_are_shown_without_that(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["tiny/llama"].more = {"safetensors": {"parameters": {"F\x1b[2J": 1}, "total": 1}}
    assert "its weights are in F[2J, and" in refused(hub.environ(tmp_path), "pull", "tiny/llama")


def test_a_configuration_that_no_memory_holds_is_refused_before_it_comes(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["tiny/llama"].sizes = {"config.json": 10**10}
    said = refused(hub.environ(tmp_path), "pull", "tiny/llama")
    assert "its config.json has 10.0 GB, and 268 MB of such a file are read at most" in said
    assert not hub.fetched("config.json")


@pytest.mark.parametrize("index", [b"[1]", b'{"weight_map": [1]}', b'{"weight_map": {"a": [1]}}', b"[" * 100_000])
def test_an_index_that_is_none_is_told_in_one_sentence(
    hub: FakeHub, tiny_with: Path, tmp_path: Path, index: bytes
) -> None:
    (tiny_with / "model.safetensors.index.json").write_bytes(index)
    assert "model.safetensors.index.json cannot be read" in refused(hub.environ(tmp_path), "pull", "tiny/llama")
