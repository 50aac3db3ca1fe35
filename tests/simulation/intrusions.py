"""Sends nodes what no proxy would send. A node must refuse it, whatever else happens."""

from __future__ import annotations

import asyncio

import msgspec

from pdserve.wire.frame import from_header, to_header
from pdserve.wire.ticket import TICKET_HEADER
from tests.simulation.clients import ROUTE, ClientRequest, fetch
from tests.simulation.cluster import HTTP_PORT, Cluster, Node
from tests.simulation.plan import PROBE, Intrusion, IntrusionKind

UNAUTHORIZED = 401
REFUSED = (UNAUTHORIZED, 503)
"""How a node refuses what comes from no proxy: with 503 when it takes no requests at all."""

COUNTERS_LATER = 1_000


async def intrude(cluster: Cluster, intrusion: Intrusion, *, serves: bool) -> None:
    """Sends it, and notes a violation if the node does not refuse it. A node that ``serves`` has to say 401."""
    await asyncio.sleep(intrusion.at_s)
    node = cluster.nodes[intrusion.node]
    header = _header(cluster, node, intrusion.kind)
    cluster.events.add(f"INTRUSION at {node.name}: {intrusion.kind.value}")
    fields = (f"{TICKET_HEADER}: {header}",) if header else ()
    body = ClientRequest(0, PROBE).body
    status, said = await cluster.as_client(fetch(node.host, HTTP_PORT, f"POST {ROUTE}", fields, body))
    if status != UNAUTHORIZED if serves else status and status not in REFUSED:
        cluster.violated(f"{node.name} answers {intrusion.kind.value} with {status} {said[:100].decode()}")


def _header(cluster: Cluster, node: Node, kind: IntrusionKind) -> str:
    """Returns the ticket that an intruder shows, the last one that fits; it is empty if there is none."""
    taken = cluster.witness.taken.values()
    own = next((one.header for one in reversed(taken) if one.process is node.process), "")
    foreign = next((one.header for one in reversed(taken) if one.process is not node.process), "")
    match kind:
        case IntrusionKind.NO_TICKET:
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
