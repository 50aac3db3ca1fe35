"""What the simulation itself sees of a run: tickets as they are signed and taken, and requests as they end.

The product's counters and answers are compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lab.simulation.machine.virtual_time import SimProcess, present_process
from lab.simulation.plan import PlannedRequest
from pdserve.api.node.serving_node import TicketGate
from pdserve.control.frame import MAX_AGE_S
from pdserve.wire.terms import PRIORITY_S, Ticket
from pdserve_kvtransfer.push.side import PushSide
from pdserve_proxy.relay.dispatch import Dispatch, TicketSigner
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.requests.admission_queue import AdmissionController, AdmissionEntry, AdmissionQueue
from pdserve_proxy.requests.request_body import GenerationBody
from pdserve_proxy.routing.router import Route

CLOCK_STEP_S = 0.002
"""How exact the times of the access log are."""


@dataclass(frozen=True)
class SignedTicket:
    """A ticket that a proxy has signed."""

    header: str
    node: bytes
    at_s: float
    deadline_s: float


@dataclass(frozen=True)
class TakenTicket:
    """A ticket that a node has taken."""

    header: str
    ticket: Ticket
    process: SimProcess
    asked_s: float
    """When a proxy has signed it. A node that was stopped takes it late, when another one may have answered."""

    @property
    def begins_answer(self) -> bool:
        """Whether the node generates for it."""
        return self.ticket.terms.resume is None or not self.ticket.terms.resume.prepare


@dataclass(frozen=True)
class EndedRequest:
    """A request as the proxy's access log has it."""

    label: str
    route: str
    status: int
    outcome: str
    at_s: float


@dataclass
class Witness:
    """What was seen in one run."""

    violated: Callable[[str], None]
    clocks_agree: Callable[[], bool]
    asked_for: Callable[[str], PlannedRequest | None]
    """Says what the client of a request has asked for, if that is known."""
    sent: set[str] = field(default_factory=set)
    """The labels of the requests that clients have sent to their last byte."""
    tried: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """The nodes for which tickets of each request were signed."""
    signed: dict[str, SignedTicket] = field(default_factory=dict)
    taken: dict[str, TakenTicket] = field(default_factory=dict)
    labels: defaultdict[SimProcess, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The requests for which each node has taken a ticket."""
    ended: defaultdict[SimProcess, list[EndedRequest]] = field(default_factory=lambda: defaultdict(list))
    """The requests that have ended at each proxy."""

    def sign(self, header: str, node: bytes, deadline_s: float) -> None:
        self.signed[header] = SignedTicket(header, node, present_process().loop.time(), deadline_s)

    def take(self, header: str, ticket: Ticket, boot_id: bytes) -> None:
        """Notes that the present process, with this boot id, has taken a ticket; says what is wrong about that."""
        process, signed, label = present_process(), self.signed.get(header), ticket.terms.prompt.request_id
        if signed is None:
            self.violated(f"{process.name} takes a ticket of {label} that no proxy has signed")
            return
        if header in self.taken:
            self.violated(f"{process.name} takes a ticket of {label} that {self.taken[header].process.name} has taken")
        if signed.node != boot_id:
            self.violated(f"{process.name} takes a ticket of {label} that is for another node")
        age_s = process.loop.time() - signed.at_s
        if age_s > signed.deadline_s + MAX_AGE_S and self.clocks_agree():
            self.violated(f"{process.name} takes a ticket of {label} that is {age_s:.1f} s old")
        self.taken[header] = TakenTicket(header, ticket, process, signed.at_s)
        self.labels[process].add(label)

    def end(self, fields: tuple[Any, ...]) -> None:
        """Notes a line of the access log of the proxy that runs now."""
        label, route, _, _, status, first_byte_s, total_s, _, outcome = fields
        now_s = present_process().loop.time()
        self.ended[present_process()].append(EndedRequest(label, route, status, outcome, now_s))
        if status == 200 and first_byte_s != "-":
            self._check_first_byte(label, now_s - total_s + float(first_byte_s))

    def _check_first_byte(self, label: str, at_s: float) -> None:
        """Checks that the first byte of an answer came after the last node was asked that was to begin with it."""
        asked = [
            one
            for one in self.taken.values()
            if one.ticket.terms.prompt.request_id == label and not one.ticket.terms.resume
        ]
        asked_s = [one.asked_s for one in asked]
        if asked_s and at_s < max(asked_s) - CLOCK_STEP_S:
            early_s = max(asked_s) - at_s
            self.violated(f"{label} has its first byte {early_s:.3f} s before the node was asked that sent it")

    def gate(self) -> type[TicketGate]:
        """Returns a gate that this witness watches."""
        witness = self

        class WatchedGate(TicketGate):
            def admit(self, header: str | None) -> Ticket:
                ticket = super().admit(header)
                witness.take(header or "", ticket, self._boot_id)
                return ticket

        return WatchedGate

    def signer(self) -> type[TicketSigner]:
        """Returns a signer that this witness watches."""
        witness = self

        class WatchedSigner(TicketSigner):
            def sign(self, ticket: Ticket) -> str:
                header = super().sign(ticket)
                witness.sign(header, ticket.node, ticket.terms.deadline_s)
                witness.tried[ticket.terms.prompt.request_id].add(ticket.node)
                return header

        return WatchedSigner

    def admission(self) -> type[AdmissionController]:
        """Returns a proxy's admission that this witness watches: requests have the priority that clients want."""
        witness = self

        class WatchedAdmission(AdmissionController):
            async def admit(self, caller: str, answers: int, hold_place: Any, priority: int = 0) -> None:
                label = hold_place.__self__.request_id
                wanted, name = witness.asked_for(label), present_process().name
                if wanted is not None and priority != wanted.priority:
                    wants = f"its client wants {wanted.priority}"
                    witness.violated(f"{name} gives {label} the priority {priority}, and {wants}")
                if wanted is not None and answers != wanted.choices:
                    witness.violated(f"{name} counts {label} as {answers} answers, which are {wanted.choices}")
                if wanted is not None and label not in witness.sent:
                    witness.violated(f"{name} gives {label} a place, whose client still sends it")
                await super().admit(caller, answers, hold_place, priority)

        return WatchedAdmission

    def dispatch(self) -> type[Dispatch]:
        """Returns a dispatch that this witness watches: a request counts as load for as many answers as it wants."""
        witness = self

        class WatchedDispatch(Dispatch):
            def begin(self, relayed: RelayedRequest, body: GenerationBody, route: Route) -> None:
                super().begin(relayed, body, route)
                wanted = witness.asked_for(relayed.request_id)
                assert relayed._attempt is not None
                counted = relayed._attempt._nodes[route.decode.boot_id]
                if wanted is not None and counted != wanted.choices:
                    what = f"{relayed.request_id} as the load of {counted} answers, which are {wanted.choices}"
                    witness.violated(f"{present_process().name} counts {what}")

        return WatchedDispatch

    def queue(self) -> type[AdmissionQueue]:
        """Returns a queue of requests at a proxy that this witness watches."""
        witness = self

        class WatchedQueue(AdmissionQueue):
            def __init__(self, *limits: Any) -> None:
                super().__init__(*limits)
                self._turns: dict[AdmissionEntry, float] = {}

            def enter(self, caller: str, now: float, answers: int = 1, priority: int = 0) -> AdmissionEntry:
                entry = super().enter(caller, now, answers, priority)
                self._turns[entry] = now + PRIORITY_S * priority
                if self.is_admitted(entry):
                    self._check_turn(entry)
                return entry

            def leave(self, entry: AdmissionEntry) -> list[AdmissionEntry]:
                self._turns.pop(entry, None)
                admitted = super().leave(entry)
                for one in admitted:
                    self._check_turn(one)
                return admitted

            def _check_turn(self, admitted: AdmissionEntry) -> None:
                if any(self._turns[other] < self._turns[admitted] for other in self._waiting):
                    witness.violated(f"{present_process().name} admits a request before one whose turn is earlier")

        return WatchedQueue

    def push_side(self) -> type[PushSide]:
        """Returns a side of pushes that this witness watches: no peer is suspected whose connection is open."""
        witness = self

        class WatchedPushSide(PushSide):
            def _on_disconnect(self, connection: int, now: float) -> None:
                # Connections go by the numbers of their sockets, which are given again. A route is one connection's.
                socket: Any = self._server.sockets[0]
                for peer in self._peers.values():
                    if peer.connection == connection and peer.route in socket.routes:
                        witness.violated(f"{present_process().name} takes a peer for gone whose connection is open")
                super()._on_disconnect(connection, now)

        return WatchedPushSide
