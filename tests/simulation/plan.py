"""What happens in one simulated run: the cluster's shape, its clients' requests, and faults. A seed makes all of it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from pdserve.config import Disaggregation, DrainMode
from pdserve.wire.discovery import Role
from tests.simulation.engine_program import MAX_MODEL_LEN, VOCAB

SETTLED_S = 2.0
"""All nodes are registered by then."""
CLUSTERS = (
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.MIXED, Role.MIXED),
    (Role.PREFILL, Role.DECODE, Role.MIXED),
)


@dataclass(frozen=True)
class Shape:
    """What a cluster is like."""

    roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE)
    num_blocks: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    step_s: float = 0.004
    delay_s: float = 0.0005
    disaggregation: Disaggregation = Disaggregation.ALWAYS
    drain: DrainMode = DrainMode.MIGRATE


@dataclass(frozen=True)
class PlannedRequest:
    """One client's request. All times of a plan count from the moment when the cluster has settled."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool = True
    salt: str = ""
    leaves_after_s: float | None = None


class FaultKind(enum.Enum):
    KILL = "the node is killed"
    KILL_ENGINE = "the node's engine process is killed"
    STOP = "the node's processes are stopped"
    STOP_ENGINE = "the node's engine process is stopped"
    CUT_PROXY = "nothing passes between the node and the proxy"
    CUT_PEERS = "nothing passes between the node and the other nodes"
    CUT_SENDING = "nothing that the node sends arrives"
    SLOW = "the node's steps take ten times as long"
    CORRUPT = "one KV block arrives with a wrong byte"
    DRAIN = "the node drains and ends"
    SKEW = "the node's wall clock is wrong by minutes"
    FAR = "everything takes a long way"
    KILL_PROXY = "the proxy is killed"


@dataclass(frozen=True)
class Fault:
    """One fault. What it does ends after ``lasts_s``: a node that is gone is started again."""

    at_s: float
    kind: FaultKind
    node: int
    lasts_s: float


@dataclass(frozen=True)
class Plan:
    """Everything that is to happen."""

    shape: Shape = field(default_factory=Shape)
    requests: tuple[PlannedRequest, ...] = ()
    faults: tuple[Fault, ...] = ()

    def smaller(self) -> Iterator[Plan]:
        """Yields this plan without one of its faults or requests."""
        for i in range(len(self.faults)):
            yield replace(self, faults=self.faults[:i] + self.faults[i + 1 :])
        for i in range(len(self.requests)):
            yield replace(self, requests=self.requests[:i] + self.requests[i + 1 :])


def plan_of(seed: int) -> Plan:
    """Returns the plan that a seed stands for."""
    random = Random(seed)
    shape = Shape(
        roles=random.choice(CLUSTERS),
        num_blocks=random.choice((20, 32, 64, 128)),
        max_num_seqs=random.choice((1, 2, 4, 8)),
        max_num_batched_tokens=random.choice((4, 8, 32)),
        step_s=random.choice((0.005, 0.02, 0.05)),
        delay_s=random.choice((0.0001, 0.001, 0.02)),
        disaggregation=random.choice((Disaggregation.ALWAYS, Disaggregation.ALWAYS, Disaggregation.AUTO)),
        drain=random.choice(tuple(DrainMode)),
    )
    requests = tuple(_request(random) for _ in range(random.randint(1, 10)))
    faults = tuple(_fault(random, len(shape.roles)) for _ in range(random.choice((0, 1, 1, 2, 3, 4))))
    return Plan(shape, requests, faults)


def _request(random: Random) -> PlannedRequest:
    stem = [random.choice((10, 20))] * random.choice((0, 4, 8, 15, 16, 24))
    prompt = [*stem, *(random.randrange(3, VOCAB) for _ in range(random.randint(0 if stem else 1, 12)))]
    return PlannedRequest(
        at_s=random.uniform(0.0, 1.5),
        prompt=tuple(prompt),
        max_tokens=min(random.choice((1, 5, 25, 40)), MAX_MODEL_LEN - len(prompt)),
        stream=random.random() < 0.75,
        salt=random.choice(("", "", "salt")),
        leaves_after_s=0.005 * 10 ** random.uniform(0.0, 2.3) if random.random() < 0.15 else None,
    )


def _fault(random: Random, nodes: int) -> Fault:
    return Fault(
        at_s=random.uniform(0.0, 2.5),
        kind=random.choice(tuple(FaultKind)),
        node=random.randrange(nodes),
        lasts_s=random.choice((0.1, 0.7, 2.0, 5.0)),
    )
