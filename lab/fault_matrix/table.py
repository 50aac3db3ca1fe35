"""What happens to a request when something fails: each fault, at each process, in each of its phases.

``CELLS`` has every combination. A cell is either a promise, which one test keeps, or the reason why there is none.
The reliability page shows this table, and ``lab.fault_matrix`` measures it.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass


class Fault(enum.Enum):
    SIGKILL = "killed"
    SIGSTOP = "stopped"
    HANG = "engine stopped"
    CUT = "cut off"
    SLOW = "slow network"
    CORRUPT = "corrupt block"
    OUT_OF_KV = "out of KV blocks"
    DISK_FULL = "disk full"
    OOM_KILL = "out of memory"
    POISON = "poisoned request"


class Victim(enum.Enum):
    PROXY = "proxy"
    PREFILL = "prefill node"
    DECODE = "decode node"
    RANK = "one rank"


class Phase(enum.Enum):
    """Where the request is when the fault comes."""

    QUEUED = "queued"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    DRAIN = "drain"


class Promise(enum.Enum):
    COMPLETE = "complete"
    """The client gets the whole right answer from the same request. It sees a pause at most."""
    ASKS_AGAIN = "asks again"
    """The client hears nothing more. It asks the other proxy, and then has the whole right answer."""
    REFUSED = "refused"
    """At most two nodes are lost. The client is told so, with its request's id, and its like is refused for a while.

    Where no decode node is left, its like is refused because of that.
    """


@dataclass(frozen=True)
class Cell:
    fault: Fault
    victim: Victim
    phase: Phase
    promise: Promise | None = None
    why_not: str = ""
    """Why there is nothing to promise; empty if there is."""
    nightly: bool = True

    @property
    def name(self) -> str:
        return "-".join(part.value.replace(" ", "_") for part in (self.fault, self.victim, self.phase))


_NO_BLOCKS_MOVE = "no block is on its way"
_REASONS: dict[tuple[Fault, Victim | None, Phase | None], str] = {
    (Fault.HANG, Victim.PROXY, None): "a proxy has no engine",
    (Fault.CUT, Victim.RANK, None): "the ranks of a node share its network: see its node",
    (Fault.SLOW, Victim.RANK, None): "the ranks of a node share its network: see its node",
    (Fault.CORRUPT, Victim.PROXY, None): "no block passes the proxy",
    (Fault.CORRUPT, None, Phase.QUEUED): _NO_BLOCKS_MOVE,
    (Fault.CORRUPT, None, Phase.PREFILL): _NO_BLOCKS_MOVE,
    (Fault.CORRUPT, None, Phase.DECODE): _NO_BLOCKS_MOVE,
    (Fault.CORRUPT, None, Phase.DRAIN): "blocks of an answer that moves are checked as in a transfer: see there",
    (Fault.CORRUPT, Victim.DECODE, Phase.TRANSFER): "the decode node receives: see the prefill node, which sends",
    (Fault.OUT_OF_KV, Victim.PROXY, None): "a proxy has no KV blocks",
    (Fault.OUT_OF_KV, Victim.RANK, None): "every rank has the same blocks: see its node",
    (Fault.OUT_OF_KV, Victim.PREFILL, Phase.DRAIN): "a prefill node that drains gets no other prompts",
    (Fault.OUT_OF_KV, Victim.PREFILL, Phase.DECODE): "the prefill node holds none of its blocks any more",
    (Fault.OOM_KILL, Victim.PROXY, None): "the kernel ends the proxy as a kill does: see there",
    (Fault.POISON, Victim.PROXY, None): "the proxy computes nothing",
    (Fault.POISON, None, Phase.QUEUED): "a request that waits is not computed",
    (Fault.POISON, Victim.PREFILL, Phase.DECODE): "the prefill node does not compute it any more",
    (Fault.POISON, Victim.DECODE, Phase.PREFILL): "the prefill node computes it",
    (Fault.POISON, Victim.DECODE, Phase.TRANSFER): "the decode node computes nothing of it yet",
}

_IN_EVERY_TEST_RUN = {
    # What tests/faults/test_node_death.py shows of a cluster on one host is not repeated.
    (Fault.SIGKILL, Victim.PROXY, Phase.DECODE),
    (Fault.SIGKILL, Victim.DECODE, Phase.TRANSFER),
    (Fault.SIGSTOP, Victim.PREFILL, Phase.TRANSFER),
    (Fault.SIGSTOP, Victim.PROXY, Phase.DECODE),
    (Fault.SIGSTOP, Victim.DECODE, Phase.DECODE),
    (Fault.HANG, Victim.DECODE, Phase.DECODE),
    (Fault.CUT, Victim.PREFILL, Phase.PREFILL),
    (Fault.CUT, Victim.PROXY, Phase.PREFILL),
    (Fault.CUT, Victim.DECODE, Phase.DECODE),
    (Fault.SLOW, Victim.PREFILL, Phase.TRANSFER),
    (Fault.SLOW, Victim.PROXY, Phase.DECODE),
    (Fault.SLOW, Victim.DECODE, Phase.QUEUED),
    (Fault.CORRUPT, Victim.PREFILL, Phase.TRANSFER),
    (Fault.OUT_OF_KV, Victim.PREFILL, Phase.QUEUED),
    (Fault.DISK_FULL, Victim.PROXY, Phase.QUEUED),
    (Fault.DISK_FULL, Victim.PREFILL, Phase.PREFILL),
    (Fault.DISK_FULL, Victim.DECODE, Phase.TRANSFER),
    (Fault.POISON, Victim.PREFILL, Phase.PREFILL),
}


def _reason(fault: Fault, victim: Victim, phase: Phase) -> str:
    keys = ((fault, victim, None), (fault, None, phase), (fault, victim, phase))
    return next((_REASONS[key] for key in keys if key in _REASONS), "")


def _promise(fault: Fault, victim: Victim) -> Promise:
    if fault is Fault.POISON:
        return Promise.REFUSED
    ends_its_connection = fault in (Fault.SIGKILL, Fault.SIGSTOP, Fault.CUT)
    return Promise.ASKS_AGAIN if victim is Victim.PROXY and ends_its_connection else Promise.COMPLETE


def _cell(fault: Fault, victim: Victim, phase: Phase) -> Cell:
    if why_not := _reason(fault, victim, phase):
        return Cell(fault, victim, phase, why_not=why_not)
    nightly = (fault, victim, phase) not in _IN_EVERY_TEST_RUN
    return Cell(fault, victim, phase, _promise(fault, victim), nightly=nightly)


CELLS = tuple(_cell(*place) for place in itertools.product(Fault, Victim, Phase))
_tested = (cell for cell in CELLS if cell.promise is not None)
TESTED = tuple(sorted(_tested, key=lambda cell: cell.victim is Victim.RANK))
"""Those with a promise. Ranks have a cluster of their own, and come last."""
