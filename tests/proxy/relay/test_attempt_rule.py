"""What a request does after each failure, without a proxy and without a node."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest

from pdserve.errors import BadUpstream, Gone, RequestError, Unavailable
from pdserve.wire.discovery import NodeInfo, Role
from pdserve_proxy.continuation.losses import MAX_LOSSES, LostNode, ReturnedRequest
from pdserve_proxy.records.node_counts import NodeFailure
from pdserve_proxy.relay.attempt_rule import (
    MAX_ATTEMPTS,
    AttemptFailure,
    AttemptRule,
    FailureKind,
    GiveUp,
    judged,
    lost,
    no_stored_answer,
    returned,
    unreachable,
)
from pdserve_proxy.relay.complete_answer import CompleteResponse
from pdserve_proxy.relay.route_wait import Wait
from pdserve_proxy.routing.router import RETRY_AFTER_S, Route
from tests.proxy.cluster import node_info

WAIT_S = 10.0
JSON = "application/json"
LOSSES = {FailureKind.LOST, FailureKind.NOT_CONTINUED, FailureKind.NOT_CONTINUED_IN_TIME}
"""The kinds by which the node that was asked is lost."""
NO_WORD_OF_A_LOSS = [kind for kind in FailureKind if kind not in LOSSES | {FailureKind.PREFILL_LOST}]


def nodes(count: int) -> list[NodeInfo]:
    return [node_info(f"n{number}", Role.MIXED, boot_id=b"%d" % number) for number in range(count)]


def among(known: Sequence[NodeInfo]) -> Callable[[frozenset[bytes]], Route]:
    """Returns what chooses the first of these nodes that may be asked."""

    def choose(excluded: frozenset[bytes]) -> Route:
        left = [node for node in known if node.boot_id not in excluded]
        if not left:
            raise Unavailable("no node", code="no_route")
        return Route(left[0], ())

    return choose


def failure(kind: FailureKind, answer: CompleteResponse | None = None, *prefill: bytes) -> AttemptFailure:
    if kind is FailureKind.PREFILL_LOST and not prefill:
        prefill = (b"p",)
    return AttemptFailure(
        kind, BadUpstream(kind.value), answer, tuple(LostNode(name, name.decode()) for name in prefill)
    )


def said(status: int) -> CompleteResponse:
    return CompleteResponse(status, {}, b"{}")


def asked(step: Route | Wait | GiveUp) -> str:
    assert isinstance(step, Route)
    return step.decode.name


def waits(step: Route | Wait | GiveUp) -> Wait:
    assert isinstance(step, Wait)
    return step


def gives_up(step: Route | Wait | GiveUp) -> GiveUp:
    assert isinstance(step, GiveUp)
    return step


@pytest.mark.parametrize(
    ("kind", "counts_as", "counted", "is_returned", "may_come_back"),
    [
        (FailureKind.BUSY, NodeFailure.REFUSED, False, False, False),
        (FailureKind.TICKET_REFUSED, NodeFailure.REFUSED, False, False, False),
        (FailureKind.NO_STORED_ANSWER, NodeFailure.REFUSED, True, False, False),
        (FailureKind.UNREACHABLE, NodeFailure.UNREACHABLE, False, False, True),
        (FailureKind.PROCESS_GONE, NodeFailure.UNREACHABLE, False, False, False),
        (FailureKind.LOST, NodeFailure.LOST, False, False, True),
        (FailureKind.NOT_CONTINUED, NodeFailure.LOST, True, False, True),
        (FailureKind.NOT_CONTINUED_IN_TIME, NodeFailure.LOST, True, False, True),
        (FailureKind.PREFILL_LOST, NodeFailure.LOST, True, True, False),
        (FailureKind.LINK_LOST, NodeFailure.REFUSED, True, True, False),
    ],
)
def test_what_follows_from_a_kind(
    kind: FailureKind, counts_as: NodeFailure, counted: bool, is_returned: bool, may_come_back: bool
) -> None:
    assert (kind.counts_as, kind.is_counted, kind.returned) == (counts_as, counted, is_returned)
    assert kind.may_come_back is may_come_back
    assert kind.is_loss is (counts_as is NodeFailure.LOST)
    assert kind.loses_decode is (kind in LOSSES)


@pytest.mark.parametrize("kind", FailureKind)
def test_after_a_failure_another_node_is_asked_and_the_same_one_only_if_it_returned_the_request(
    kind: FailureKind,
) -> None:
    rule = AttemptRule(WAIT_S)
    rule.failed(b"0", failure(kind), 0.0)
    assert rule.attempts == 1
    assert asked(rule.next(among(nodes(2)), 0.0)) == ("n0" if kind.returned else "n1")


@pytest.mark.parametrize("kind", NO_WORD_OF_A_LOSS)
def test_a_request_that_no_node_takes_is_not_kept_waiting(kind: FailureKind) -> None:
    rule = AttemptRule(WAIT_S)
    rule.failed(b"0", failure(kind, said(503)), 0.0)
    end = gives_up(rule.next(among([]), 0.0))
    assert (end.error.message, end.answer, end.losses) == (kind.value, said(503), ())


@pytest.mark.parametrize("kind", [FailureKind.LOST, FailureKind.NOT_CONTINUED, FailureKind.PREFILL_LOST])
def test_after_a_loss_a_request_waits_for_a_node_and_keeps_its_place(kind: FailureKind) -> None:
    rule = AttemptRule(WAIT_S)
    rule.failed(b"busy", failure(FailureKind.BUSY), 1.0)
    rule.failed(b"0", failure(kind), 2.0)
    wait = waits(rule.next(among([]), 3.0))
    assert (wait.until_s, wait.keeps_place) == (3.0 + WAIT_S, True)
    again_s = 2.0 + RETRY_AFTER_S if kind is FailureKind.PREFILL_LOST else math.inf
    assert wait.asked_again_s == {b"busy": 1.0 + RETRY_AFTER_S, b"0": again_s}
    rule.failed(b"busy", failure(FailureKind.BUSY), 9.0)
    later = waits(rule.next(among([]), 9.0))
    assert later.until_s == 3.0 + WAIT_S, "the wait began once"
    assert later.asked_again_s[b"busy"] == 9.0 + RETRY_AFTER_S
    assert gives_up(rule.give_up()).losses == (), "one loss is no suspicion"


def test_a_request_that_has_waited_for_a_node_that_goes_on_waits_no_longer() -> None:
    rule = AttemptRule(WAIT_S)
    rule.failed(b"0", failure(FailureKind.NOT_CONTINUED_IN_TIME), 5.0)
    assert waits(rule.next(among([]), 6.0)).until_s == 5.0


def test_no_node_is_asked_after_two_losses_and_any_number_of_refusals_costs_none() -> None:
    """Every order of three failures, each of which another node could follow."""
    for kinds in itertools.product(FailureKind, repeat=3):
        rule, known, losses = AttemptRule(WAIT_S), nodes(4), set[bytes]()
        node = known[0].boot_id
        for kind in kinds:
            rule.failed(node, failure(kind), 0.0)
            if kind in LOSSES:
                losses.add(node)
            elif kind is FailureKind.PREFILL_LOST:
                losses.add(b"p")
            step = rule.next(among(known), 0.0)
            if len(losses) >= MAX_LOSSES:
                gives_up(step)
                break
            assert isinstance(step, Route), kinds
            node = step.decode.boot_id
        assert len(rule.give_up().losses) == (len(losses) if len(losses) >= MAX_LOSSES else 0), kinds


def test_two_reports_of_one_lost_prefill_node_count_once_and_one_of_two_nodes_twice() -> None:
    rule = AttemptRule(WAIT_S)
    for node in (b"0", b"1"):
        rule.failed(node, failure(FailureKind.PREFILL_LOST, None, b"p"), 0.0)
    assert asked(rule.next(among(nodes(3)), 0.0)) == "n0"
    rule.failed(b"0", failure(FailureKind.PREFILL_LOST, None, b"q"), 0.0)
    assert len(gives_up(rule.next(among(nodes(3)), 0.0)).losses) == 2
    at_once = AttemptRule(WAIT_S)
    at_once.failed(b"0", failure(FailureKind.PREFILL_LOST, None, b"p", b"q"), 0.0)
    assert len(gives_up(at_once.next(among(nodes(3)), 0.0)).losses) == 2


def test_a_decode_node_counts_beside_a_prefill_node() -> None:
    rule = AttemptRule(WAIT_S)
    rule.failed(b"0", failure(FailureKind.PREFILL_LOST), 0.0)
    rule.failed(b"0", failure(FailureKind.LOST), 0.0)
    assert gives_up(rule.next(among(nodes(3)), 0.0)).losses == ("prefill_lost", "lost")


def test_not_more_than_so_many_nodes_are_asked() -> None:
    rule, known = AttemptRule(WAIT_S), nodes(MAX_ATTEMPTS + 1)
    for node, then in itertools.pairwise(known):
        rule.failed(node.boot_id, failure(FailureKind.BUSY, said(503)), 0.0)
        if rule.attempts < MAX_ATTEMPTS:
            assert asked(rule.next(among(known), 0.0)) == then.name
    assert gives_up(rule.next(among(known), 0.0)).answer == said(503)


@pytest.mark.parametrize("kind", FailureKind)
def test_who_asks_again_waits_without_a_place_for_nodes_that_may_come_back(kind: FailureKind) -> None:
    rule = AttemptRule(WAIT_S, asks_again=True)
    rule.failed(b"0", failure(kind), 1.0)
    step = rule.next(among([]), 2.0)
    if not kind.may_come_back or kind is FailureKind.NOT_CONTINUED_IN_TIME:  # which has waited already
        gives_up(step)
        return
    wait = waits(step)
    assert wait.keeps_place is False
    assert wait.asked_again_s == {b"0": 1.0 + RETRY_AFTER_S}
    assert wait.until_s == 2.0 + WAIT_S
    rule.failed(b"0", failure(kind), 2.0 + WAIT_S)
    gives_up(rule.next(among([]), 2.0 + WAIT_S))


def test_connections_that_break_make_no_suspect_of_who_asks_again() -> None:
    rule, known = AttemptRule(WAIT_S, asks_again=True), nodes(5)
    for node in known[:4]:
        rule.failed(node.boot_id, failure(FailureKind.LOST), 0.0)
    assert asked(rule.next(among(known), 0.0)) == "n4"
    assert rule.give_up().losses == ()


@pytest.mark.parametrize("order", list(itertools.permutations((FailureKind.NO_STORED_ANSWER, FailureKind.BUSY))))
def test_an_answer_is_not_said_to_be_gone_where_a_node_could_not_be_asked(order: tuple[FailureKind, ...]) -> None:
    rule, status = AttemptRule(WAIT_S, asks_again=True), {FailureKind.NO_STORED_ANSWER: 410, FailureKind.BUSY: 503}
    for number, kind in enumerate(order):
        rule.failed(b"%d" % number, failure(kind, said(status[kind])), 0.0)
    assert rule.give_up().answer == said(503)


def test_where_no_node_has_the_answer_the_last_one_speaks() -> None:
    rule = AttemptRule(WAIT_S, asks_again=True)
    for number in range(2):
        rule.failed(b"%d" % number, no_stored_answer(f"n{number}", said(410)), 0.0)
    end = rule.give_up()
    assert (end.answer, end.error.code) == (said(410), "answer_not_kept")
    assert isinstance(end.error, Gone)


def test_a_node_that_fails_twice_has_its_last_failure_and_is_the_last_one() -> None:
    rule = AttemptRule(WAIT_S)
    rule.failed(b"0", failure(FailureKind.LINK_LOST), 0.0)
    rule.failed(b"1", failure(FailureKind.BUSY, said(503)), 0.0)
    rule.failed(b"0", failure(FailureKind.TICKET_REFUSED), 0.0)
    assert rule.give_up().error.message == "ticket_refused"


def test_answers_for_the_client_are_told_from_failures() -> None:
    for status in (200, 400, 404, 500, 504):
        assert judged("n", said(status), JSON) == said(status)
    busy, silent = judged("n", said(503), JSON), judged("n", said(503), "text/html")
    refused = judged("n", said(401), JSON)
    assert isinstance(busy, AttemptFailure)
    assert (busy.kind, busy.answer, busy.error.code) == (FailureKind.BUSY, said(503), "upstream_busy")
    assert isinstance(silent, AttemptFailure)
    assert (silent.kind, silent.answer) == (FailureKind.BUSY, None)
    assert isinstance(refused, AttemptFailure)
    assert (refused.kind, refused.error.code) == (FailureKind.TICKET_REFUSED, "ticket_refused")
    for status, content_type in ((100, JSON), (301, JSON), (304, JSON), (600, JSON), (200, "text/plain")):
        with pytest.raises(BadUpstream) as caught:
            judged("n", said(status), content_type)
        assert caught.value.code == "upstream_invalid"


@pytest.mark.parametrize(
    ("made", "kind", "error", "code"),
    [
        (unreachable("n", process_gone=True), FailureKind.PROCESS_GONE, Unavailable, "upstream_unreachable"),
        (unreachable("n", process_gone=False), FailureKind.UNREACHABLE, Unavailable, "upstream_unreachable"),
        (lost("n", OSError("reset")), FailureKind.LOST, BadUpstream, "upstream_lost"),
        (
            returned("n", ReturnedRequest("why", (LostNode(b"p"),))),
            FailureKind.PREFILL_LOST,
            BadUpstream,
            "upstream_lost",
        ),
        (returned("n", ReturnedRequest("why", ())), FailureKind.LINK_LOST, Unavailable, "upstream_busy"),
    ],
)
def test_failures_are_made_of_what_happened(
    made: AttemptFailure, kind: FailureKind, error: type[RequestError], code: str
) -> None:
    assert (made.kind, type(made.error), made.error.code) == (kind, error, code)
    assert made.error.retry_after_s == (RETRY_AFTER_S if error is Unavailable else None)
