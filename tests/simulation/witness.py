"""What the simulation itself sees of a run: tickets as they are signed and taken, and requests as they end.

The product's counters and answers are compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdserve.api.serving_node import TicketGate
from pdserve.wire.frame import MAX_AGE_S
from pdserve.wire.ticket import Ticket
from pdserve_proxy.relay.dispatch import TicketSigner
from pdserve_proxy.requests.admission_queue import AdmissionController, AdmissionEntry, AdmissionQueue
from tests.simulation.invariants import PRIORITY_S
from tests.simulation.virtual_time import SimProcess, present_process


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

    @property
    def begins_answer(self) -> bool:
        """Whether the node generates for it."""
        return self.ticket.resume is None or not self.ticket.resume.prepare


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
    priority_of: Callable[[str], int | None]
    """Says which priority the client of a request wants, if that is known."""
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
        process, signed, label = present_process(), self.signed.get(header), ticket.request_id
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
        self.taken[header] = TakenTicket(header, ticket, process)
        self.labels[process].add(label)

    def end(self, fields: tuple[Any, ...]) -> None:
        """Notes a line of the access log of the proxy that runs now."""
        label, route, _, _, status, *_, outcome = fields
        self.ended[present_process()].append(EndedRequest(label, route, status, outcome, present_process().loop.time()))

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
            def issue(self, route: Any, *, deadline_s: float, **more: Any) -> str:
                header = super().issue(route, deadline_s=deadline_s, **more)
                witness.sign(header, route.decode.boot_id, deadline_s)
                return header

        return WatchedSigner

    def admission(self) -> type[AdmissionController]:
        """Returns a proxy's admission that this witness watches: requests have the priority that clients want."""
        witness = self

        class WatchedAdmission(AdmissionController):
            async def admit(self, caller: str, answers: int, hold_place: Any, priority: int = 0) -> None:
                label = hold_place.__self__.request_id
                wanted = witness.priority_of(label)
                if wanted is not None and priority != wanted:
                    name = present_process().name
                    witness.violated(f"{name} gives {label} the priority {priority}, and its client wants {wanted}")
                await super().admit(caller, answers, hold_place, priority)

        return WatchedAdmission

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
