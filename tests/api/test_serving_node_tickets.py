"""Tests that a node that belongs to a proxy serves only requests with the proxy's ticket, and each ticket only once."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdserve.api.node.serving_node import TicketGate
from pdserve.control.frame import Purpose, Sealer
from pdserve.control.journal import digest
from pdserve.errors import Unauthorized
from pdserve.wire.ids import new_id
from pdserve.wire.terms import AnswerIdentity, PrefillTarget, Resume, Ticket
from tests.terms import made_ticket

SECRET = b"a cluster secret"
NODE = new_id()
TARGET = PrefillTarget("prefill-1", "tcp://127.0.0.1:9", new_id())


def ticket(node: bytes = NODE, deadline_s: float = 12.5, **more: Any) -> Ticket:
    return made_ticket(node, 2, request_id="r-1", deadline_s=deadline_s, prefill=(TARGET,), **more)


def header(frame: bytes) -> str:
    return base64.urlsafe_b64encode(frame).rstrip(b"=").decode()


def sealed(message: msgspec.Struct, secret: bytes = SECRET, purpose: Purpose = Purpose.TICKET) -> str:
    return header(Sealer(secret, purpose, new_id()).seal(message))


def refusal(gate: TicketGate, value: str | None) -> Unauthorized:
    with pytest.raises(Unauthorized) as raised:
        gate.admit(value)
    return raised.value


def test_good_ticket() -> None:
    assert TicketGate(SECRET, NODE).admit(sealed(ticket())) == ticket()


def test_tickets_may_overtake_each_other() -> None:
    sealer = Sealer(SECRET, Purpose.TICKET, new_id())
    frames = [header(sealer.seal(ticket())) for _ in range(3)]
    gate = TicketGate(SECRET, NODE)
    for frame in reversed(frames):
        assert gate.admit(frame) == ticket()


def test_replayed_ticket() -> None:
    gate = TicketGate(SECRET, NODE)
    value = sealed(ticket())
    gate.admit(value)
    assert "replayed" in refusal(gate, value).message


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def aged(seconds: float, deadline_s: float) -> tuple[TicketGate, str]:
    """Returns a gate, and a ticket of this age that the gate has not seen."""
    clock = Clock()
    value = header(Sealer(SECRET, Purpose.TICKET, new_id(), clock=clock).seal(ticket(deadline_s=deadline_s)))
    clock.now += seconds
    return TicketGate(SECRET, NODE, clock), value


@pytest.mark.parametrize("waited_s", [61.0, 300.0, 599.0])
def test_a_request_that_had_to_queue_is_not_refused_for_it(waited_s: float) -> None:
    gate, value = aged(waited_s, deadline_s=600.0)
    assert gate.admit(value).terms.deadline_s == 600.0
    assert "replayed" in refusal(gate, value).message


def test_a_ticket_is_no_good_when_its_request_is_over() -> None:
    gate, value = aged(661.0, deadline_s=600.0)
    assert refusal(gate, value).code == "bad_ticket"


def test_no_ticket_is_good_for_longer_than_a_request_may_take() -> None:
    gate, value = aged(0.0, deadline_s=1e9)
    assert refusal(gate, value).code == "bad_ticket"


def test_ticket_for_another_node() -> None:
    assert refusal(TicketGate(SECRET, NODE), sealed(ticket(new_id()))).code == "wrong_node"


def test_a_ticket_resumes_no_nameless_answer() -> None:
    answer, resume = AnswerIdentity(bytes(16), 1), Resume(0, digest(b""))
    named = ticket(answer=answer, resume=resume)
    assert TicketGate(SECRET, NODE).admit(sealed(named)) == named
    nameless = ticket(resume=resume)
    assert refusal(TicketGate(SECRET, NODE), sealed(nameless)).code == "bad_ticket"


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: "",
        lambda: "not base64 ü",
        lambda: "AAAA",
        lambda: "A" * 20_000,
        lambda: sealed(ticket(), b"another secret"),
        lambda: sealed(ticket(), purpose=Purpose.DISCOVERY),
        lambda: sealed(TARGET),
        lambda: sealed(ticket())[:-3] + "AAA",
    ],
)
def test_anything_else(make: Callable[[], str | None]) -> None:
    assert refusal(TicketGate(SECRET, NODE), make()).status == 401
