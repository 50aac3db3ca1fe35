"""Tests requests straight to nodes, with tickets that are missing, forged, used, or valid but useless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest

from pdserve.control.frame import UNNAMED, Purpose, Sealer
from pdserve.control.journal import cut, digest, entry, parse
from pdserve.wire.discovery import NodeHeartbeat, NodeLoad
from pdserve.wire.ids import new_id
from pdserve.wire.terms import AnswerIdentity, PrefillTarget, Resume
from tests.attacks.attack import attacks, carry_out, check_answer
from tests.attacks.case import BAD, CHAT, DETOKENIZE, EITHER, FINE, TEXT, TOKENIZE, At, HttpCase, body_with, head, post
from tests.attacks.client import Connection
from tests.attacks.insider import ANSWER, FOREIGN, SECRET, Office, changed, flipped, header, sealed
from tests.attacks.target import NEW_TOKENS, Target

pytestmark = pytest.mark.usefixtures("unharmed")

REFUSED = frozenset({401})


@dataclass(frozen=True)
class TicketCase:
    """One request to the decode node, with the header that this case makes."""

    name: str
    make: Callable[[Office], str]
    """Returns the value of the ticket's header."""


def signed_ticket(office: Office, field: bytes) -> bytes:
    """Returns a valid ticket with one more field at its end, in a valid frame."""
    ticket = msgspec.msgpack.encode(office.ticket())
    sealer = Sealer(SECRET, Purpose.TICKET, new_id())
    return sealer._seal(UNNAMED, new_id(), bytes((ticket[0] + 1,)) + ticket[1:] + field)


def with_fields(name: str, answer: AnswerIdentity | None = None, resume: Resume | None = None) -> TicketCase:
    """Returns a signed ticket with these fields."""
    return TicketCase(name, lambda office: header(sealed(office.ticket(answer=answer, resume=resume), Purpose.TICKET)))


FORGED = (
    TicketCase("nothing", lambda _: ""),
    TicketCase("one letter", lambda _: "x"),
    TicketCase("no base64url", lambda _: "!" * 100),
    TicketCase("ordinary base64", lambda _: "+/+/" * 30),
    TicketCase("no ASCII", lambda _: "\xff\xfe" * 50),
    TicketCase("17,000 letters", lambda _: "A" * 17_000),
    TicketCase("random bytes", lambda _: header(new_id() * 12)),
    TicketCase("MessagePack of nothing", lambda _: header(b"\xc0")),
    TicketCase("an empty list", lambda _: header(b"\x90")),
    TicketCase("a map", lambda _: header(msgspec.msgpack.encode({"node": 1}))),
    TicketCase("deep lists", lambda _: header(b"\x91" * 10_000)),
    TicketCase("a list that says it is huge", lambda _: header(b"\xdd\xff\xff\xff\xff")),
    TicketCase("half a frame", lambda office: header(office.frame()[:60])),
    TicketCase("a frame and more", lambda office: header(office.frame() + b"\0")),
    TicketCase("another version", lambda office: header(changed(office.frame(), 0, lambda _: 2))),
    TicketCase("version 3", lambda office: header(changed(office.frame(), 0, lambda _: 3))),
    # A ticket names its node inside itself, not in its frame.
    TicketCase(
        "a frame that names this node",
        lambda office: header(sealed(office.ticket(), Purpose.TICKET, receiver=office.node)),
    ),
    TicketCase(
        "a frame that names another node",
        lambda office: header(sealed(office.ticket(), Purpose.TICKET, receiver=new_id())),
    ),
    TicketCase("unknown fields 9,000 deep", lambda office: header(signed_ticket(office, b"\xa1x" + b"\x91" * 9_000))),
    TicketCase(
        "a name that is no UTF-8",
        lambda office: header(signed_ticket(office, b"\xa5terms\x81\xa6prompt\x81\xaarequest_id\xa2\xff\xfe")),
    ),
    TicketCase("another sender", lambda office: header(changed(office.frame(), 1, lambda _: new_id()))),
    TicketCase("another counter", lambda office: header(changed(office.frame(), 2, lambda _: 2**62))),
    TicketCase("a negative counter", lambda office: header(changed(office.frame(), 2, lambda _: -1))),
    TicketCase("a counter of 2^64 - 1", lambda office: header(changed(office.frame(), 2, lambda _: 2**64 - 1))),
    TicketCase("another time", lambda office: header(changed(office.frame(), 3, lambda _: 0))),
    TicketCase("another body", lambda office: header(changed(office.frame(), 4, flipped))),
    TicketCase("another signature", lambda office: header(changed(office.frame(), 5, flipped))),
    TicketCase("a short signature", lambda office: header(changed(office.frame(), 5, lambda _: b""))),
    TicketCase(
        "another cluster's secret", lambda office: header(sealed(office.ticket(), Purpose.TICKET, secret=FOREIGN))
    ),
    TicketCase("no secret", lambda office: header(sealed(office.ticket(), Purpose.TICKET, secret=b""))),
    TicketCase("another channel's purpose", lambda office: header(sealed(office.ticket(), Purpose.TRANSFER))),
    TicketCase(
        "another channel's message",
        lambda _: header(sealed(NodeHeartbeat(new_id(), NodeLoad()), Purpose.DISCOVERY)),
    ),
    TicketCase(
        "a message that is no ticket", lambda _: header(sealed(NodeHeartbeat(new_id(), NodeLoad()), Purpose.TICKET))
    ),
    TicketCase("an old one", lambda office: header(office.frame(late_s=1_000))),
    TicketCase("one of tomorrow", lambda office: header(office.frame(late_s=-86_400))),
    TicketCase("no time left", lambda office: header(sealed(office.ticket(deadline_s=-1.0), Purpose.TICKET))),
    TicketCase("a deadline of years", lambda office: header(sealed(office.ticket(deadline_s=1e9), Purpose.TICKET))),
    TicketCase(
        "a deadline of no number", lambda office: header(sealed(office.ticket(deadline_s=float("nan")), Purpose.TICKET))
    ),
    TicketCase("another node", lambda office: header(sealed(office.ticket(node=new_id()), Purpose.TICKET))),
    with_fields("a short name of an answer", answer=AnswerIdentity(bytes(15), 1)),
    with_fields("an answer of 2^53 seconds", answer=AnswerIdentity(bytes(16), 2**53)),
    with_fields("a journal without an answer", resume=Resume(0, digest(b""))),
    with_fields("a journal that is not there", answer=ANSWER, resume=Resume(5, digest(b"0 33\n"))),
    with_fields("a journal of 2^26 bytes that is not there", answer=ANSWER, resume=Resume(2**26, digest(b""))),
    with_fields("a journal of 2^40 bytes", answer=ANSWER, resume=Resume(2**40, digest(b""))),
    with_fields("a journal of -1 bytes", answer=ANSWER, resume=Resume(-1, digest(b""))),
    with_fields("a short digest", answer=ANSWER, resume=Resume(0, bytes(31))),
    with_fields("another digest", answer=ANSWER, resume=Resume(0, bytes(32))),
    TicketCase(
        "an attempt of 2^40",
        lambda office: header(sealed(msgspec.structs.replace(office.ticket(), attempt=2**40), Purpose.TICKET)),
    ),
)
NOWHERE = {
    "a port where nobody listens": "tcp://127.0.0.1:1",
    "nothing": "",
    "a word": "x",
    "no port": "tcp://127.0.0.1",
    "a port of 99999": "tcp://127.0.0.1:99999",
    "another transport": "udp://127.0.0.1:9",
    "a name that is none": "tcp://256.256.256.256:1",
    "a NUL": "tcp://127.0.0.1:1\0",
}


@pytest.fixture
def office(attacked: Target) -> Office:
    return Office(bytes.fromhex(attacked.instance(attacked.decode)["boot_id"]))


def asked(target: Target, *tickets: str) -> bytes:
    """Returns the ordinary request with these tickets."""
    return post(TEXT, msgspec.json.encode(target.ordinary()), *(f"X-Pdserve-Ticket: {ticket}" for ticket in tickets))


@pytest.mark.parametrize("case", attacks(FORGED))
def test_a_forged_ticket(attacked: Target, office: Office, case: TicketCase) -> None:
    request = asked(attacked, case.make(office))
    carry_out(attacked, HttpCase(case.name, (request,), REFUSED, at=At.DECODE))
    attacked.attack_is_over()


@pytest.mark.parametrize("where", NOWHERE)
def test_a_ticket_to_a_prefill_node_that_is_none(attacked: Target, office: Office, where: str) -> None:
    ticket = header(office.frame(PrefillTarget("nobody", NOWHERE[where], new_id())))
    carry_out(attacked, HttpCase(where, (asked(attacked, ticket),), FINE, tokens=True, at=At.DECODE))
    attacked.attack_is_over()


def test_a_ticket_to_another_boot_of_the_prefill_node(attacked: Target, office: Office) -> None:
    control = attacked.instance(attacked.prefill)["control"]
    ticket = header(office.frame(PrefillTarget("an older boot", control, new_id())))
    carry_out(attacked, HttpCase("boot", (asked(attacked, ticket),), FINE, tokens=True, at=At.DECODE))
    attacked.check_answers()


def test_a_ticket_is_good_once(attacked: Target, office: Office) -> None:
    case = HttpCase("once", (asked(attacked, header(office.frame())),), FINE, tokens=True, at=At.DECODE)
    carry_out(attacked, case)
    carry_out(attacked, replace(case, allowed=REFUSED, tokens=False))
    attacked.check_answers()


UNASKED = tuple(
    HttpCase(
        f"{path} of {at.value}",
        (post(path, body_with(path, {})),),
        at=at,
    )
    for path in (CHAT, TEXT, TOKENIZE, DETOKENIZE)
    for at in (At.DECODE, At.PREFILL)
)


@pytest.mark.parametrize("case", attacks(UNASKED))
def test_nodes_serve_nobody_without_a_ticket(attacked: Target, case: HttpCase) -> None:
    allowed = REFUSED if case.at is At.DECODE else frozenset({401, 404})
    carry_out(attacked, replace(case, allowed=allowed))


@pytest.mark.parametrize("path", ["/", "/instances", "/v1/models/x", "/v1/engines", "/docs/x", "/debug", "/.env"])
@pytest.mark.parametrize("at", [At.PROXY, At.DECODE, At.PREFILL])
def test_routes_that_are_none(attacked: Target, at: At, path: str) -> None:
    # A page whose own name leads to loopback sees no nodes: these requests have such a name.
    of_proxy = {"/": FINE, "/instances": frozenset({403})} if at is At.PROXY else {}
    allowed = of_proxy.get(path, frozenset({404}))
    carry_out(attacked, HttpCase(path, (head("GET", path),), allowed, method="GET", at=at))


def streamed(target: Target, journal: bytes, ticket: str = "") -> bytes:
    """Returns the ordinary request for a stream, with a journal behind its body."""
    body = msgspec.json.encode(target.ordinary(stream=True)) + journal
    return post(TEXT, body, *([f"X-Pdserve-Ticket: {ticket}"] if ticket else []))


JOURNALS = {
    "no entries": b"x",
    "a choice that is none": b"7 5\n",
    "a choice of seven digits": b"9999999 5\n",
    "a token that is none": b"0 4000000000\n",
    "a million tokens": b"0" + b" 5" * 1_000_000 + b"\n",
    "a million entries": b"0\n" * 1_000_000 + b"x",
    "an end and more": b"0.\n0 5\n",
    "NULs": bytes(100_000),
    "JSON": b'{"stream": false}',
    "no UTF-8": b"\xff\xfe\n",
    "numbers of other scripts": "0 \u0663\n".encode(),
}


@pytest.mark.parametrize("name", JOURNALS)
def test_a_journal_that_is_none(attacked: Target, office: Office, name: str) -> None:
    request = streamed(attacked, JOURNALS[name], office.resuming(JOURNALS[name]))
    carry_out(attacked, HttpCase(name, (request,), BAD, at=At.DECODE))
    attacked.attack_is_over()


def test_a_client_cannot_resume(attacked: Target, office: Office) -> None:
    """Neither the proxy nor a node takes a journal that no ticket announces."""
    journal = b"0 5 5\n"
    carry_out(attacked, HttpCase("at the proxy", (streamed(attacked, journal),), BAD))
    carry_out(attacked, HttpCase("with a ticket", (streamed(attacked, journal, office.resuming(journal)),), BAD))
    carry_out(attacked, HttpCase("without", (streamed(attacked, journal),), REFUSED, at=At.DECODE))
    named = header(sealed(office.ticket(answer=ANSWER), Purpose.TICKET))
    carry_out(attacked, HttpCase("unannounced", (streamed(attacked, journal, named),), BAD, at=At.DECODE))
    attacked.check_answers()


@pytest.mark.parametrize("count", [1, NEW_TOKENS - 1, NEW_TOKENS])
def test_a_journal_is_good_with_its_ticket(attacked: Target, office: Office, count: int) -> None:
    """The engine goes on after the journal's tokens: the attacks above fail for what is wrong about them alone."""
    journal = entry(0, attacked.tokens[:count])[1:]
    with Connection(attacked.decode.url) as connection:
        connection.send(streamed(attacked, journal, office.resuming(journal)))
        answer = connection.answer()
    assert answer is not None
    shown, entries = cut(answer.body)
    chunks = [msgspec.json.decode(event[6:]) for event in shown.split(b"\n\n") if event.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token_id for choice in choices for token_id in choice.get("token_ids", ())] == attacked.tokens[count:]
    assert choices[-1]["finish_reason"] == "length"
    assert parse(journal + entries, 1, 10**6).emitted(0) == tuple(attacked.tokens)
    attacked.check_answers()


def test_of_two_tickets_one_counts(attacked: Target, office: Office) -> None:
    good = header(office.frame())
    for tickets in ((good, "x"), ("x", good)):
        with Connection(attacked.decode.url) as connection:
            connection.send(asked(attacked, *tickets))
            answer = connection.answer()
            assert answer is not None
            check_answer(answer, HttpCase("two", (), REFUSED | EITHER))
    attacked.check_answers()
