"""A field that has no effect is in a node's log once for each client, and memory for that is bounded."""

from __future__ import annotations

import logging

import pytest

from pdserve.api.node.serving_node import MAX_CLIENTS, MAX_FIELDS, IgnoredFields
from tests.api.node import MODEL, NodeUnderTest
from tests.api.plain_http import post

TEXT = {"model": MODEL, "prompt": "Hi"}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_field_is_logged_once_for_each_client(caplog: pytest.LogCaptureFixture) -> None:
    fields = IgnoredFields()
    fields.note(b"a", [], "r0")
    assert said(caplog) == []
    fields.note(b"a", ["x", "y", "x"], "r1")
    (line,) = said(caplog)
    assert line.startswith("request_id=r1 has fields that have no effect here: x, y. ")
    fields.note(b"a", ["y", "x"], "r2")
    assert said(caplog) == []
    fields.note(b"a", ["y", "z"], "r3")
    assert "here: z. " in said(caplog)[0]
    fields.note(b"b", ["x"], "r4")
    assert "request_id=r4" in said(caplog)[0]


def test_a_client_that_makes_up_names_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fields = IgnoredFields()
    for number in range(5 * MAX_FIELDS):
        fields.note(b"a", [f"field{number}"], "r")
    assert len(said(caplog)) == MAX_FIELDS


def test_the_clients_that_had_such_fields_last_are_remembered(caplog: pytest.LogCaptureFixture) -> None:
    fields = IgnoredFields()
    for number in range(MAX_CLIENTS):
        fields.note(b"%d" % number, ["x"], "r")
    fields.note(b"0", ["x"], "r")
    fields.note(b"new", ["x"], "r")
    said(caplog)
    fields.note(b"0", ["x"], "r")
    assert said(caplog) == []
    fields.note(b"1", ["x"], "r")
    assert len(said(caplog)) == 1


def test_a_nodes_log_names_the_field_of_one_of_two_requests(node: NodeUnderTest) -> None:
    for name in ("one_name", "bad\r\nname", "one_name", "last_name"):
        answer = post(f"{node.url}/v1/completions", {**TEXT, "seed": 0, name: 1})
        assert answer.status == 200
        assert answer.headers["x-pdserve-ignored"]
    node.process.wait_for(lambda line: "no effect here: last_name" in line)
    lines = [line for line in node.process.output.splitlines() if "no effect here" in line]
    # Other tests of this node have fields of their own.
    assert sum("no effect here: one_name. " in line for line in lines) == 1
    assert sum("no effect here: bad??name. " in line for line in lines) == 1
