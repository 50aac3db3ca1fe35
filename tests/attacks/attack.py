"""Carries out attacks over HTTP and checks what comes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

import pytest

from tests.attacks.case import At, HttpCase, head
from tests.attacks.client import Answer, Connection
from tests.attacks.target import Target


class Named(Protocol):
    """Any kind of case: it has a name."""

    @property
    def name(self) -> str: ...


def attacks(cases: Iterable[Named]) -> list[Any]:
    """Returns a test parameter for each case."""
    return [pytest.param(case, id=case.name) for case in cases]


def url_of(target: Target, at: At) -> str:
    return {At.PROXY: target.cluster.url, At.DECODE: target.decode.url, At.PREFILL: target.prefill.url}[at]


def carry_out(target: Target, case: HttpCase) -> None:
    """Raises AssertionError if the answer is not one that the case allows."""
    with Connection(url_of(target, case.at)) as connection:
        for piece in case.pieces:
            connection.send(piece)
        answer = connection.answer(case.method)
        if answer is None:
            assert case.closes, "closed without an answer"
            return
        check_answer(answer, case)
        if case.tokens:
            assert target.answer_tokens(answer.body) == target.tokens
        if case.complete:
            _check_in_step(connection)


def check_answer(answer: Answer, case: HttpCase) -> None:
    assert answer.status in case.allowed, (answer.status, answer.body[:500])
    if answer.status < 400 or case.method == "HEAD":
        return
    error = checked_error(answer)
    if case.param is not None:
        param = error["param"]
        assert isinstance(param, str) and param.startswith(case.param), error


def checked_error(answer: Answer) -> dict[str, object]:
    """Returns the error of an answer, which must be in OpenAI's form."""
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, object] = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"] and isinstance(error["message"], str), error
    assert error["type"] and isinstance(error["type"], str), error
    return error


def _check_in_step(connection: Connection) -> None:
    """Checks that no part of the attack counts as a request: an answer that comes next is that of the next request."""
    connection.send(head("GET", "/version"))
    answer = connection.answer("GET")
    assert answer is None or (answer.status == 200 and b'"version"' in answer.body), answer
