"""Runs the example programs, which are clients, against a cluster with a random model."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster, cluster
from tests.example_programs.cutting_relay import cutting_relay
from tests.example_programs.programs import EXAMPLES, run_example

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[Cluster]:
    """Yields a prefill and a decode node, which every test of this module shares."""
    with cluster(tiny_model, "--dtype", "fp32") as found:
        yield found


@pytest.mark.parametrize("name", ["chat.py", "messages.py"])
def test_a_stream_has_the_text_of_the_whole_answer(running: Cluster, name: str) -> None:
    written = run_example(name, running.url).stdout
    found = re.fullmatch(
        r"whole:    (.+)\nstreamed: (.+)\n.*?(\d+)(?: of answer| tokens of answer)\n", written, re.DOTALL
    )
    assert found is not None, written
    assert found[1] == found[2]
    assert int(found[3]) == 32, "the random model ends no answer by itself"


def test_the_agent_calls_its_tool_and_answers(running: Cluster) -> None:
    written = run_example("agent.py", running.url).stdout
    calls = re.findall(r"^called temperature\((\{.*\})\): (\{.*\})$", written, re.MULTILINE)
    assert calls, written
    for arguments, result in ((json.loads(call), json.loads(result)) for call, result in calls):
        assert arguments.keys() == {"city", "unit"}
        assert (result["city"], result["unit"]) == (arguments["city"], arguments["unit"])
    assert re.search(r"^answer: .+", written, re.MULTILINE), written


def test_the_answer_follows_the_schema(running: Cluster) -> None:
    written = run_example("json_schema.py", running.url).stdout
    assert re.fullmatch(r"""(['"]).*\1 wrote a (complaint|question|praise) of urgency [1-5]\n""", written, re.DOTALL)


def test_a_stream_goes_on_where_its_connections_broke(running: Cluster) -> None:
    """Nothing is lost or doubled, though two connections break within an event, each behind one.

    A busy node sends few events, with many tokens each.
    """
    whole = run_example("resume_stream.py", running.url)
    assert whole.stderr == ""
    with cutting_relay(running.url, cut_behind=[1, 1]) as relay:
        broken = run_example("resume_stream.py", relay.url)
    assert broken.stdout == whole.stdout
    assert broken.stderr.count("the connection broke behind event") == 2
    ids = [re.search(rb"(?im)^last-event-id: ?(\S*)\r$", request) for request in relay.requests]
    assert [bool(found and found[1]) for found in ids] == [False, True, True]
    numbers = [int(found[1].rpartition(b".")[2]) for found in ids[1:] if found]
    assert 0 < numbers[0] < numbers[1]


def test_every_example_says_what_it_shows_and_is_in_the_table() -> None:
    page = (EXAMPLES / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| (.+) \|$", page, re.MULTILINE))
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert rows.keys() >= programs
    for name in programs:
        docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
        assert docstring is not None
        assert re.fullmatch(r"[A-Z].*[.]", docstring.partition("\n\n")[0], re.DOTALL), name
    for name in rows:
        assert (EXAMPLES / name).exists(), name
    files = {path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    for path in files - {Path("README.md")}:
        assert any(str(each) in rows or f"{each}/" in rows for each in [path, *path.parents]), path
