"""Tests that the log names each field without an effect once to each client."""

from __future__ import annotations

import logging

import pytest

from pdserve_proxy.requests import ignored_fields
from pdserve_proxy.requests.ignored_fields import IgnoredFields


def test_each_client_is_told_once_of_each_field(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields = IgnoredFields()
    for client, names in (("ann", "a,b"), ("ann", "b,a"), ("bob", "a"), ("ann", "a,c")):
        fields.tell(client, "r-1", names)
    assert [record.getMessage() for record in caplog.records] == [
        "request_id=r-1 client=ann sends fields that have no effect: a, b",
        "request_id=r-1 client=bob sends fields that have no effect: a",
        "request_id=r-1 client=ann sends fields that have no effect: c",
    ]


def test_what_is_remembered_is_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(ignored_fields, "MAX_CLIENTS", 2)
    fields = IgnoredFields()
    for number in range(200):
        fields.tell("ann", "r", f"f{number}")
    assert len(caplog.records) == ignored_fields.MAX_NAMES
    caplog.clear()
    for client in ("bob", "cid", "ann", "cid"):
        fields.tell(client, "r", "x")
    assert [record.getMessage().split()[1] for record in caplog.records] == ["client=bob", "client=cid", "client=ann"]
