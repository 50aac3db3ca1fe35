"""Defects that an attack on the whole system found once, put back into today's code: each mend is taken out.

The page about the simulation says which points of that attack they are, and why others are outside of what it runs.
"""

from __future__ import annotations

from lab.simulation.defects.mutants import Change, Mutant

GUARD = "pdserve.http.guard"
RELAY = "pdserve_proxy.relay"
RETRIED = 'headers["x-should-retry"] = "false"'

PUT_BACK = (
    Mutant(
        "an offered upgrade turns a body into the next request",
        606,
        f"{GUARD}.GuardedHttp",
        "_parse",
        "if self._offers_upgrade and self._phase is _BODY:",
        "if False:",
    ),
    Mutant(
        "a request has a place while its body is on its way",
        285,
        "pdserve_proxy.relayed_routes.RelayedRoutes",
        "_forward",
        "data = await request.body(self._max_body_bytes, held)",
        "await self._admission.admit(caller, 1, relayed.hold_place); "
        "data = await request.body(self._max_body_bytes, held)",
    ),
    Mutant(
        "admission counts requests and not answers",
        5,
        "pdserve_proxy.relayed_routes.RelayedRoutes",
        "_forward",
        "body.answers, relayed.hold_place",
        "1, relayed.hold_place",
    ),
    Mutant(
        "a node's load counts requests and not answers",
        5,
        f"{RELAY}.dispatch.Dispatch",
        "begin",
        "(route.decode, body.answers)",
        "(route.decode, 1)",
    ),
    Mutant(
        "one request for many answers takes every place in the batch before others",
        46,
        "pdserve.engine.scheduling.queues.Queues",
        "in_turn",
        "if group in later or group in self._places:",
        "if False:",
    ),
    Mutant(
        "the proxy drops X-Accel-Buffering",
        1,
        f"{RELAY}.relay",
        "relayed_headers",
        "if name in RELAYED_HEADERS",
        'if name in RELAYED_HEADERS and name != "x-accel-buffering"',
    ),
    Mutant(
        "a node tokenises without a ticket",
        139,
        "pdserve.api.routes.app.TokenizerRoutes",
        "_admit",
        "admit_ticket(request, self._node)",
        "None",
    ),
    Mutant(
        "a request may have two hosts",
        606,
        f"{GUARD}.GuardedHttp",
        "_flaw",
        "if hosts > 1 or (not hosts and",
        "if (not hosts and",
    ),
    Mutant(
        "a client of HTTP/1.0 gets chunks",
        959,
        GUARD,
        "_unchunked",
        "cycle.chunked_encoding = False",
        "pass",
    ),
    Mutant(
        "a client that has closed its half gets no answer",
        16,
        f"{GUARD}.GuardedHttp",
        "eof_received",
        'if self._phase is _ANSWERING and self.scheme == "http":',
        "if False:",
    ),
    Mutant(
        "an encoded body is read as it is",
        447,
        "pdserve.http.request.HttpRequest",
        "_check_encoding",
        'if encoding.lower() != "identity":',
        "if False:",
    ),
    Mutant(
        "a prefill node to which no link leads kills the engines that order from it",
        474,
        "pdserve_kvtransfer.fetch.peer.FetchPeer",
        "_apply",
        "if isinstance(effect, FetchMessage) and self._lost is None:",
        "if isinstance(effect, FetchMessage):",
        (Change("pdserve_kvtransfer.fetch.peer.FetchPeer", "_read_ranks", "if self._lost is None:", "if True:"),),
    ),
    Mutant(
        "a prompt is ordered that is longer than the prefill node has said it takes",
        1392,
        "pdserve.engine.placement.placement.Placement",
        "decide",
        "0 < longest < prompt.missing_tokens + prompt.cached_tokens",
        "False",
    ),
    Mutant(
        "requests wait for a host that is gone although the registry has dropped it",
        1101,
        f"{RELAY}.relay.Relay",
        "__aenter__",
        "self._registry.on_loss(lambda node: self._pool.suspect(node.url))",
        "pass",
    ),
    Mutant(
        "a node that no proxy has accepted is ready",
        391,
        "pdserve.api.node.serving_node.ServingNode",
        "unready",
        'return None if unaccepted is None else ("unregistered", unaccepted)',
        "return None",
    ),
    Mutant(
        "a burst gets more connections to nodes than there may be",
        1283,
        "pdserve_proxy.upstream.node_pool.NodePool",
        "_make_room",
        "len(self._open) + len(self._connecting)",
        "len(self._open)",
    ),
    Mutant(
        "two busy nodes turn a request away while a third is free",
        1171,
        f"{RELAY}.attempt_rule.AttemptRule",
        "next",
        "self.attempts >= MAX_ATTEMPTS",
        "self.attempts >= 2",
    ),
    Mutant(
        "a node beats as it was configured and not as its proxy has told it",
        139,
        "pdserve.api.node.proxy_link.ProxyLink",
        "_on_welcome",
        "self._heartbeat_s = welcome.heartbeat_ms / 1000",
        "pass",
    ),
    Mutant(
        "an attempt at a busy node counts as its load for ever",
        1171,
        f"{RELAY}.relayed_request.RelayedRequest",
        "begin_attempt",
        "self._end_attempt()",
        "pass",
    ),
    Mutant(
        "a prompt that a prefill node refuses counts as its failure",
        2312,
        "pdserve.engine.kv_connector.prompt_fetcher.PromptFetcher",
        "_record_failure",
        "out_of_time or kind in (FailureKind.REFUSED, FailureKind.OVERLOADED, FailureKind.CLOSED):",
        "out_of_time:",
    ),
    Mutant(
        "a client that has waited until its deadline is not told to stay away",
        20,
        "pdserve.http.request",
        "error_headers",
        RETRIED,
        "pass",
        (
            Change("pdserve.http.routes", "error_headers", RETRIED, "pass"),
            Change("pdserve.api.answers.answer", "error_headers", RETRIED, "pass"),
        ),
    ),
    Mutant(
        "prompts that are fetched take the places of the batch",
        1674,
        "pdserve.engine.scheduling.batch_admission.BatchAdmission",
        "has_place",
        "len(self._queues.running)",
        "self._queues.num_admitted",
    ),
    Mutant(
        "the first byte is that of the node that was busy",
        163,
        f"{RELAY}.relay",
        "take_complete",
        "if body and response.status not in REFUSALS:",
        "if body:",
        (
            Change(
                f"{RELAY}.relayed_request.RelayedRequest",
                "begin_attempt",
                "self.first_byte_at_s = self.prompt_done_s = None",
                "pass",
            ),
            Change(f"{RELAY}.complete_answer", "_read_all", "if response.status not in REFUSALS:", "if True:"),
        ),
    ),
    Mutant(
        "a connection that has ended takes the next one with its number along",
        4,
        "pdserve_kvtransfer.push.side.PushSide",
        "turn",
        "for connection in batch.gone:",
        "for connection in batch.ended:",
    ),
)
"""The seed of each finds it."""
