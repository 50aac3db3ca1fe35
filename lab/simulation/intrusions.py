"""Sends nodes what no proxy would send. A node must refuse it, whatever else happens."""

from __future__ import annotations

import asyncio

import msgspec

from lab.simulation.clients import ROUTE, ClientRequest, fetch
from lab.simulation.cluster import HTTP_PORT, Cluster, Node
from lab.simulation.plan import OF_REQUESTS, PROBE, Intrusion, IntrusionKind
from pdserve.control.frame import from_header, to_header
from pdserve.wire.terms import TICKET_HEADER
from pdserve_proxy.relay.relay import UNAUTHORIZED

TAKES_NONE = 503
"""The status of a node that takes no requests at all."""

COUNTERS_LATER = 1_000
_MORE_FIELDS = {
    IntrusionKind.TWO_HOSTS: ("host: another.example",),
    IntrusionKind.ENCODED: ("content-encoding: gzip",),
}
_STATUSES = {IntrusionKind.TWO_HOSTS: 400, IntrusionKind.ENCODED: 415}


async def intrude(cluster: Cluster, intrusion: Intrusion, *, serves: bool) -> None:
    """Sends it, and notes a violation if the node does not refuse it. One that ``serves`` has to say why."""
    await asyncio.sleep(intrusion.at_s)
    node = cluster.nodes[intrusion.node]
    kind = intrusion.kind
    header = _header(cluster, node, kind)
    cluster.events.add(f"INTRUSION at {node.name}: {intrusion.kind.value}")
    fields: tuple[str, ...] = (f"{TICKET_HEADER}: {header}",) if header else ()
    fields += _MORE_FIELDS.get(kind, ())
    body, route = ClientRequest(0, PROBE).body, "/tokenize" if kind in OF_REQUESTS else ROUTE
    status, said = await cluster.as_client(fetch(node.host, HTTP_PORT, f"POST {route}", fields, body))
    right = _STATUSES.get(kind, UNAUTHORIZED)
    if status != right if serves else status and status not in (right, TAKES_NONE):
        cluster.violated(f"{node.name} answers {intrusion.kind.value} with {status} {said[:100].decode()}")


def _header(cluster: Cluster, node: Node, kind: IntrusionKind) -> str:
    """Returns the ticket that an intruder shows, the last one that fits; it is empty if there is none."""
    taken = cluster.witness.taken.values()
    own = next((one.header for one in reversed(taken) if one.process is node.process), "")
    foreign = next((one.header for one in reversed(taken) if one.process is not node.process), "")
    match kind:
        case IntrusionKind.NO_TICKET | IntrusionKind.TOKENIZE | IntrusionKind.TWO_HOSTS | IntrusionKind.ENCODED:
            return ""
        case IntrusionKind.USED_TICKET:
            return own
        case IntrusionKind.FOREIGN_TICKET:
            return foreign
        case IntrusionKind.CHANGED_TICKET:
            return _renumbered(own) if own else ""


def _renumbered(header: str) -> str:
    """Returns a ticket that looks like the sender's next one: only its signature is not of what it says."""
    version, sender, counter, *rest = msgspec.msgpack.decode(from_header(header, len(header)))
    return to_header(msgspec.msgpack.encode([version, sender, counter + COUNTERS_LATER, *rest]))
