"""A stream that its node ended with an error event counts as failed, or as refused if the client was wrong."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.config import Switch
from pdserve.errors import DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from pdserve.http.errors import ErrorForm, error_body, error_event
from pdserve_proxy.relay.event_stream import BEGINNING_BYTES, MAX_EVENT_BYTES, error_outcome, last_event
from pdserve_proxy.relay.outcomes import RelayOutcome, has_failed
from tests.proxy.cluster import cluster, metric, proxy_config
from tests.proxy.fake_node import EVENTS, Exchange
from tests.proxy.journaling_nodes import ANSWER, dies_at, nodes
from tests.proxy.shared_proxy import SharedProxy

CLIENTS = InvalidRequest("the request's parameters leave no token", code="no_token_left")
NODES = Unavailable("this node is shutting down", code="shutting_down")
LATE = DeadlineExceeded("the request's deadline passed before its answer was complete", code="deadline_exceeded")
LONG = Unavailable("long" * MAX_EVENT_BYTES, code="shutting_down")


def failed_response(code: str, text: str = "") -> bytes:
    begin = b'event: response.failed\ndata: {"type":"response.failed","response":{"id":"resp_1","status":"failed",'
    said = b'"error":{"code":"%b","message":"m"},"output":["%b"]},"sequence_number":7}\n\n'
    return begin + said % (code.encode(), text.encode())


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        *[(error_event(CLIENTS, form), RelayOutcome.REFUSED) for form in (ErrorForm.OPENAI, ErrorForm.ANTHROPIC)],
        *[(error_event(NODES, form), RelayOutcome.UPSTREAM_FAILED) for form in ErrorForm],
        *[(error_event(LATE, form), RelayOutcome.TIMED_OUT) for form in ErrorForm],
        (b"id: k.s.17\n" + error_event(CLIENTS), RelayOutcome.REFUSED),
        (failed_response("invalid_prompt"), RelayOutcome.REFUSED),
        (failed_response("server_error"), RelayOutcome.UPSTREAM_FAILED),
        (failed_response("server_error", "long" * BEGINNING_BYTES), RelayOutcome.UPSTREAM_FAILED),
        (b"event: error\ndata: {half\n\n", RelayOutcome.UPSTREAM_FAILED),
        (b'event: error\ndata: {"error": 7}\n\n', RelayOutcome.UPSTREAM_FAILED),
        (b"data: [DONE]\n\n", None),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', None),
        (b'data: {"text":"event: error\\nevent: response.failed"}\n\n', None),
    ],
)
@pytest.mark.parametrize("before", [b"", b"".join(EVENTS[:1]), error_event(NODES)])
def test_the_last_of_the_events_counts(before: bytes, events: bytes, outcome: RelayOutcome | None) -> None:
    assert error_outcome(last_event(before + events)) is outcome


def test_what_is_looked_at_is_bounded() -> None:
    assert (
        len(last_event(error_event(NODES) + failed_response("server_error", "x" * 2 * BEGINNING_BYTES)))
        == BEGINNING_BYTES
    )


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(CLIENTS, "refused"), (NODES, "upstream_failed"), (LATE, "timed_out"), (LONG, "upstream_failed")],
    ids=["client's", "node's", "late", "long"],
)
@pytest.mark.parametrize("resume", Switch)
@pytest.mark.parametrize("pieces", [1, 2])
async def test_it_counts_with_a_journal_and_without(
    error: RequestError, outcome: str, resume: Switch, pieces: int
) -> None:
    """The error comes alone, or with what was before it."""

    async def fail(exchange: Exchange) -> None:
        journaled, told = resume is Switch.ON, error_event(error)
        await exchange.begin_stream()
        begin = ANSWER[0] if journaled else EVENTS[0]
        for piece in [begin, told] if pieces == 2 else [begin + told]:
            await exchange.chunk(piece)
        await exchange.finish()

    base = proxy_config()
    config = dataclasses.replace(base, relay=dataclasses.replace(base.relay, resume=resume))
    async with cluster(config) as running, nodes(running, fail):
        async with running.chat(stream=True) as response:
            assert (await response.read()).endswith(error_event(error))
        assert await metric(running, f'pdserve_proxy_outcomes_total{{outcome="{outcome}"}}') == 1


async def test_a_long_error_counts_also_where_the_journal_has_none_of_its_stream(proxy: SharedProxy) -> None:
    async def fail(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(error_event(LONG))
        await exchange.finish()

    async with proxy.cluster() as running, nodes(running, dies_at(1), fail):
        async with running.chat(stream=True) as response:
            assert (await response.read()).endswith(error_event(LONG))
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="ok"}') == 0
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="upstream_failed"}') == 1


async def test_a_whole_answer_that_its_node_gave_up_in_the_end_is_late(proxy: SharedProxy) -> None:
    async def give_up(exchange: Exchange) -> None:
        await exchange.answer(LATE.status, error_body(LATE))

    async with proxy.cluster() as running, nodes(running, give_up):
        async with running.chat() as response:
            assert response.status == 504
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="timed_out"}') == 1


def test_a_clients_own_error_is_no_failure_of_the_cluster() -> None:
    assert has_failed(200, RelayOutcome.UPSTREAM_FAILED)
    assert not has_failed(200, RelayOutcome.REFUSED)
