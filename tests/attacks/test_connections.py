"""Tests that connections which are unused, slow or abandoned keep no other client out."""

from __future__ import annotations

import enum
import json
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.attacks.attack import attacks, check_answer
from tests.attacks.case import BAD, TEXT, TOKENIZE, HttpCase, body_with, head, post
from tests.attacks.client import Connection
from tests.attacks.target import CONTEXT, Target

pytestmark = pytest.mark.usefixtures("unharmed")

BODY = body_with(TOKENIZE, {})
CHUNKED = head("POST", TOKENIZE, "Transfer-Encoding: chunked")
HELD = 20
"""The number of connections of each kind that are open at once."""
TURNS = 5


class Stage(enum.Enum):
    """The stage that a request has reached, as the bytes that were sent until then."""

    CONNECTED = b""
    METHOD = b"POST /v1/compl"
    HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: pdserve\r\nContent-"
    BEFORE_BODY = head("POST", TEXT, "Content-Length: 1000")
    IN_BODY = head("POST", TEXT, "Content-Length: 1000") + b'{"model": '
    EXPECTING = head("POST", TEXT, "Content-Length: 1000", "Expect: 100-continue")
    CHUNK_SIZE = CHUNKED + b"ff"
    IN_CHUNK = CHUNKED + b"ff\r\n{"
    BEFORE_LAST_CHUNK = CHUNKED + b"%x\r\n%b\r\n" % (len(BODY), BODY)
    TRAILER = CHUNKED + b"%x\r\n%b\r\n0\r\nX-T" % (len(BODY), BODY)


class Leaving(enum.Enum):
    CLOSE = "closes"
    RESET = "resets"
    HALF = "half-closes and then closes"


@dataclass(frozen=True)
class LeavingCase:
    stage: Stage
    leaving: Leaving

    @property
    def name(self) -> str:
        return f"{self.stage.name.lower()}, {self.leaving.value}"


def leave(connection: Connection, leaving: Leaving) -> None:
    match leaving:
        case Leaving.RESET:
            connection.reset()
        case Leaving.HALF:
            connection.half_close()
        case Leaving.CLOSE:
            pass  # The end of the block closes the connection.


@pytest.mark.parametrize("case", attacks(LeavingCase(stage, leaving) for stage in Stage for leaving in Leaving))
def test_a_client_that_leaves(attacked: Target, case: LeavingCase) -> None:
    for _ in range(5):
        with Connection(attacked.cluster.url) as connection:
            connection.send(case.stage.value)
            leave(connection, case.leaving)
    attacked.attack_is_over()


@pytest.mark.parametrize("stage", Stage)
def test_a_request_that_ends_too_early(attacked: Target, stage: Stage) -> None:
    """The client half-closes and waits. The proxy answers or closes the connection."""
    with Connection(attacked.cluster.url) as connection:
        connection.send(stage.value)
        connection.half_close()
        answer = connection.answer()
        if answer is not None:
            check_answer(answer, HttpCase(stage.name, (), BAD | {408}))
    attacked.attack_is_over()


@pytest.mark.parametrize("leaving", Leaving)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_an_answer(attacked: Target, stream: bool, leaving: Leaving) -> None:
    """The client leaves after the first bytes of a stream, or while an answer is computed. All blocks become free."""
    body = attacked.ordinary(stream=stream, max_tokens=CONTEXT - 100, n=4)
    with Connection(attacked.cluster.url) as connection:
        connection.send(post(TEXT, json.dumps(body).encode()))
        if stream:
            assert connection.read(100).startswith(b"HTTP/1.1 200")
        leave(connection, leaving)
    attacked.check_answers()
    attacked.cluster.until_idle()


@pytest.mark.parametrize("leaving", Leaving)
def test_a_client_that_leaves_a_prefill(attacked: Target, leaving: Leaving) -> None:
    body = attacked.ordinary(prompt=[11 + i % 400 for i in range(CONTEXT - 50)])
    for _ in range(5):
        with Connection(attacked.cluster.url) as connection:
            connection.send(post(TEXT, json.dumps(body | attacked.salt()).encode()))
            leave(connection, leaving)
    attacked.check_answers()
    attacked.cluster.until_idle()


def test_a_client_that_has_said_all_is_answered(attacked: Target) -> None:
    with Connection(attacked.cluster.url) as connection:
        connection.send(post(TEXT, json.dumps(attacked.ordinary()).encode()))
        connection.half_close()
        answer = connection.answer()
        assert answer is not None
        assert attacked.answer_tokens(answer.body) == attacked.tokens


def test_slow_clients_hold_up_nobody(attacked: Target) -> None:
    """Some clients are idle at every stage of a request, others send a byte now and then. None delays others."""
    slow = post(TEXT, json.dumps(attacked.ordinary()).encode())
    with ExitStack() as stack:
        for stage in Stage:
            for _ in range(HELD):
                stack.enter_context(Connection(attacked.cluster.url)).send(stage.value)
        trickling = [stack.enter_context(Connection(attacked.cluster.url)) for _ in range(HELD)]
        for turn in range(TURNS):
            for connection in trickling:
                connection.send(slow[turn : turn + 1])
            attacked.check_answers()


def test_readers_that_do_not_read_hold_up_nobody(attacked: Target) -> None:
    body = attacked.ordinary(stream=True, max_tokens=CONTEXT - 100, logprobs=20)
    with ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(Connection(attacked.cluster.url))
            connection.send(post(TEXT, json.dumps(body | attacked.salt()).encode()))
        for _ in range(TURNS):
            attacked.check_answers()
    attacked.cluster.until_idle()


def test_many_connections_one_after_the_other(attacked: Target) -> None:
    for _ in range(200):
        with Connection(attacked.cluster.url):
            pass
    attacked.check_answers()
