"""What happens in one simulated run: the cluster's shape, its clients' requests, and faults. A seed makes all of it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from lab.simulation.reference import MAX_MODEL_LEN, VOCAB
from pdserve.config import Disaggregation, DrainMode
from pdserve.wire.discovery import Role

LEAST_S = 0.05
"""A smaller plan moves nothing that is shorter."""
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


class CacheShape(enum.Enum):
    """Which kinds of layers the model has, and so which groups its cache."""

    WHOLE = "whole contexts"
    WINDOW = "whole contexts and a window"
    STATE = "whole contexts and a state"
    ALL_KINDS = "whole contexts, a window and a state"


@dataclass(frozen=True)
class Shape:
    """What a cluster is like."""

    roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE)
    proxies: int = 1
    tp_sizes: tuple[int, ...] = ()
    """How many tensor-parallel ranks each node has; 1 if there is no number for it."""
    kv_heads: int = 1
    workers: int = 1
    """The processes in which each proxy serves clients."""
    target_ttft_ms: float = 0.0
    """With a target, the first proxy moves nodes between the roles."""
    target_itl_ms: float = 0.0
    cache: CacheShape = CacheShape.WHOLE
    num_blocks: int = 64
    window_blocks: int = 64
    states: int = 32
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    step_s: float = 0.004
    delay_s: float = 0.0005
    disaggregation: Disaggregation = Disaggregation.ALWAYS
    drain: DrainMode = DrainMode.MIGRATE
    timeout_s: float = 20.0
    """A request's deadline."""
    max_in_flight: int = 4096
    """The answers that the proxy lets be under way at once."""
    max_queued: int = 1024
    """The requests that may wait at the proxy."""
    heartbeat_ms: int = 1_000
    """How often nodes tell proxies that they live; three that are missed are too many."""
    max_connections: int = 4096
    """The connections that each process of a proxy may have to nodes."""
    max_prefill_len: int = MAX_MODEL_LEN
    """The longest context of prefill nodes."""
    max_waiting: int = 32
    """The requests that may wait at a node."""
    prefill_answers: bool = False
    """Whether prefill nodes that have nothing to prefill answer requests themselves."""
    draft_tokens: tuple[int, ...] = ()
    """How many drafts each node checks of a request at once; 0 is none. Without a number, what is the default."""
    right_drafts: float | None = None
    """The share of drafts that are right; None if they come from requests' own texts."""
    buffer_bytes: int = 64 * 1024
    """What a program writes before it is told that the other side does not read. Short answers need a small one."""

    def tp_size(self, node: int) -> int:
        return self.tp_sizes[node] if node < len(self.tp_sizes) else 1

    @property
    def counts(self) -> tuple[int, ...]:
        """How many blocks each group of an engine's cache has."""
        match self.cache:
            case CacheShape.WHOLE:
                return (self.num_blocks,)
            case CacheShape.WINDOW:
                return (self.num_blocks, self.window_blocks)
            case CacheShape.STATE:
                return (self.num_blocks, self.states)
            case CacheShape.ALL_KINDS:
                return (self.num_blocks, self.window_blocks, self.states)

    @property
    def turns_away(self) -> bool:
        """Whether a burst of requests is more than the cluster takes."""
        return self.max_in_flight < 64 or self.max_waiting < 32 or self.max_connections < 64

    @property
    def moves_roles(self) -> bool:
        return bool(self.target_ttft_ms)

    @property
    def in_a_hurry(self) -> bool:
        """Whether requests may meet their deadline without a fault."""
        return self.timeout_s < 20.0


class Manner(enum.Enum):
    """How a client sends its request and reads the answer."""

    PLAIN = "plain"
    READS_SLOWLY = "reads slowly"
    SENDS_SLOWLY = "sends slowly"
    SENDS_HALF = "sends half"
    """The rest never comes."""
    LEAVES_IN_UPLOAD = "leaves in the upload"
    SAYS_MORE = "says more"
    """It sends its next request without having read the answer to this one, which ends the connection."""
    CLOSES_ITS_HALF = "closes its half"
    """It says that it sends nothing more, and reads on."""
    OFFERS_UPGRADE = "offers an upgrade"
    """Its body comes a moment after a head that offers to speak HTTP/2."""
    SPEAKS_1_0 = "speaks HTTP/1.0"

    @property
    def sends_all(self) -> bool:
        return self not in (Manner.SENDS_HALF, Manner.LEAVES_IN_UPLOAD)


@dataclass(frozen=True)
class PlannedRequest:
    """One client's request. All times of a plan count from the moment when the cluster has settled."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool = True
    salt: str = ""
    leaves_after_s: float | None = None
    choices: int = 1
    """How many answers it asks for."""
    seed: int | None = None
    """The answers are drawn with this seed; None takes the likeliest tokens."""
    stop_at: int | None = None
    """The two characters of the first answer from this one on are the stop string."""
    priority: int = 0
    scored: bool = False
    """Whether the log probabilities of the prompt's tokens are asked for."""
    manner: Manner = Manner.PLAIN
    key: str = ""
    """The ``Idempotency-Key``."""
    asks_again_s: float | None = None
    """After this time the client sends the same request once more, with the same key."""
    tries: int = 1
    """How often the client asks if it is told to come back later."""
    proxy: int = 0
    """The proxy that is asked, or is asked first."""
    returns: bool = False
    """Whether the client asks again, at one proxy after the other, until it has its answer."""

    def less(self) -> Iterator[PlannedRequest]:
        """Yields requests that come earlier, are shorter, or ask for less than this one."""
        plain = PlannedRequest(self.at_s, self.prompt, self.max_tokens)
        for name in ("salt", "leaves_after_s", "choices", "seed", "stop_at", "priority", "scored", "manner", "tries"):
            if getattr(self, name) != getattr(plain, name):
                yield replace(self, **{name: getattr(plain, name)})
        if self.asks_again_s is not None:
            yield replace(self, asks_again_s=None)
        if len(self.prompt) > 1:
            yield replace(self, prompt=self.prompt[: len(self.prompt) // 2])
        if self.max_tokens > 1:
            yield replace(self, max_tokens=self.max_tokens // 2)
        if self.at_s > LEAST_S:
            yield replace(self, at_s=round(self.at_s / 2, 3))

    @property
    def stays(self) -> bool:
        """Whether the client waits for its answer, and has asked for it."""
        return self.leaves_after_s is None and self.manner.sends_all


PROBE = PlannedRequest(0.0, (5, 6, 7, 8, 9), 3, stream=False)
"""A short request that has no part in the plan."""


class IntrusionKind(enum.Enum):
    """What somebody who is no proxy sends to a node. The node must refuse it."""

    NO_TICKET = "a request without a ticket"
    USED_TICKET = "a ticket that was taken before"
    FOREIGN_TICKET = "a ticket for another node"
    CHANGED_TICKET = "a ticket that says something else than was signed"
    TOKENIZE = "a text to tokenise without a ticket"
    TWO_HOSTS = "a request with two hosts"
    ENCODED = "an encoded body"


OF_TICKETS = tuple(IntrusionKind)[:4]
"""What has to do with the ticket of a request to generate."""
OF_REQUESTS = tuple(IntrusionKind)[4:]


@dataclass(frozen=True)
class Intrusion:
    at_s: float
    kind: IntrusionKind
    node: int


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
    STOP_PROXY = "the proxy is stopped, or of several processes only the supervisor"
    SKEW_PROXY = "the proxy's wall clock is wrong"
    CUT_ONE_PROXY = "nothing passes between the node and one proxy"
    CUT_RECEIVING = "nothing that others send arrives at the node"
    CUT_ONE_WAY = "nothing that the node sends arrives at one other node"
    RESET = "all connections of the node break"
    LAG = "each connection of the node has a delay of its own"
    DRIFT = "the node's wall clock is wrong"
    CLOCK_STANDS = "the node's wall clock stands still"
    TWICE = "messages of the node arrive twice"
    SHORT = "messages of the node arrive in part"
    ALTERED = "messages of the node arrive with a wrong byte"
    BLOCK_TWICE = "some KV blocks arrive twice"
    BLOCK_SHORT = "some KV blocks arrive in part"
    LINK_BREAKS = "the link of the next KV block breaks"
    CRASH = "the node is killed in the middle of what it does"
    CRASH_ENGINE = "the node's engine process is killed in the middle of what it does"
    CRASH_PROXY = "the proxy is killed in the middle of what it does"
    CRASH_FETCH = "the engine that fetches is killed in the middle of a transfer"
    CRASH_PUSH = "the engine that sends is killed in the middle of a transfer"
    SET_ROLE = "the operator gives the node another role"
    COMMAND_DRAIN = "the operator drains the node"
    NO_BLOCKS = "the node's engine has no free block"
    NO_DISK = "the node has died, and cannot start because its disk is full"
    NO_MEMORY = "the node's engine is refused memory in its next step"
    VANISH = "the node's host is gone without a word, and started again"
    NO_LINK = "no link for KV blocks leads to the node or from it"
    WRONG_SECRET = "the node has died, and starts with another cluster secret"
    KILL_WORKER = "a worker of the proxy is killed"
    STOP_WORKER = "a worker of the proxy is stopped"
    CRASH_WORKER = "a worker of the proxy is killed in the middle of what it does"
    KILL_RANK = "a rank of the node is killed"
    STOP_RANK = "a rank of the node is stopped"
    CRASH_RANK = "a rank of the node is killed in the middle of what it does"
    CRASH_RANK_FETCHING = "a rank is killed in the middle of a transfer that its engine fetches"
    CRASH_RANK_PUSHING = "a rank is killed in the middle of a transfer that its engine sends"
    RANK_LINK_BREAKS = "the link of the next KV block of one rank breaks"
    RANK_CORRUPT = "a KV block of one rank arrives with a wrong byte"
    RANK_SHORT = "a KV block of one rank arrives in part"
    RANK_TWICE = "a KV block of one rank arrives twice"
    RANK_LATE = "all KV blocks come late to one rank"


AT_WORKER = (FaultKind.KILL_WORKER, FaultKind.STOP_WORKER, FaultKind.CRASH_WORKER)
AT_PROXY = frozenset(
    {FaultKind.KILL_PROXY, FaultKind.STOP_PROXY, FaultKind.SKEW_PROXY, FaultKind.CRASH_PROXY, *AT_WORKER}
)
"""What happens to a proxy. Everything else happens to a node."""
FIRST = tuple(FaultKind)[: tuple(FaultKind).index(FaultKind.STOP_PROXY)]
RESOURCES = (FaultKind.NO_BLOCKS, FaultKind.NO_DISK)
"""Something that a node needs is used up."""
RARER = (FaultKind.VANISH, FaultKind.NO_LINK, FaultKind.WRONG_SECRET)
"""They happen in a part of the seeds only, see ``_stranger``."""
OF_RANKS = tuple(FaultKind)[tuple(FaultKind).index(FaultKind.KILL_RANK) :]
"""What happens to one tensor-parallel rank of a node."""
WIDER = tuple(
    kind for kind in FaultKind if kind not in (*FIRST, *RESOURCES, *AT_WORKER, *OF_RANKS, *RARER, FaultKind.NO_MEMORY)
)


@dataclass(frozen=True)
class Fault:
    """One fault. What it does ends after ``lasts_s``: a node that is gone is started again."""

    at_s: float
    kind: FaultKind
    node: int
    lasts_s: float
    proxy: int = 0
    other: int = 1
    """The second node, of those that are not the first one, or the worker, or the rank."""
    amount: int = 0
    """Which one, or how much: the steps before a crash, the seconds of a clock, the number of blocks or of a role."""

    def less(self) -> Iterator[Fault]:
        """Yields faults that come earlier, last for less time, or do less than this one."""
        if self.lasts_s > LEAST_S:
            yield replace(self, lasts_s=round(self.lasts_s / 2, 3))
        if self.at_s > LEAST_S:
            yield replace(self, at_s=round(self.at_s / 2, 3))
        if self.amount > 1:
            yield replace(self, amount=self.amount // 2)


@dataclass(frozen=True)
class Plan:
    """Everything that is to happen."""

    shape: Shape = field(default_factory=Shape)
    requests: tuple[PlannedRequest, ...] = ()
    faults: tuple[Fault, ...] = ()
    intrusions: tuple[Intrusion, ...] = ()

    @property
    def is_calm(self) -> bool:
        """Whether each request is answered at its first try, by one node."""
        shape, asked = self.shape, self.requests
        undisturbed = not self.faults and not (shape.turns_away or shape.in_a_hurry or shape.moves_roles)
        return undisturbed and all(request.stays and not (request.key or request.returns) for request in asked)

    def calmed(self) -> Plan:
        """Returns the plan without anything that could disturb it: all counters are known at its end."""
        asked = tuple(
            replace(request, leaves_after_s=None, key="", asks_again_s=None, manner=Manner.PLAIN)
            for request in self.requests
        )
        shape = Shape(roles=self.shape.roles, step_s=self.shape.step_s, num_blocks=self.shape.num_blocks)
        return Plan(shape, asked)

    def smaller(self) -> Iterator[Plan]:
        """Yields this plan with less: without a fault or a request, or with one that is shorter, earlier or plainer."""
        for i in range(len(self.faults)):
            yield replace(self, faults=self.faults[:i] + self.faults[i + 1 :])
        for i in range(len(self.requests)):
            yield replace(self, requests=self.requests[:i] + self.requests[i + 1 :])
        for i in range(len(self.intrusions)):
            yield replace(self, intrusions=self.intrusions[:i] + self.intrusions[i + 1 :])
        for i, fault in enumerate(self.faults):
            for less in fault.less():
                yield replace(self, faults=(*self.faults[:i], less, *self.faults[i + 1 :]))
        for i, request in enumerate(self.requests):
            for plainer in request.less():
                yield replace(self, requests=(*self.requests[:i], plainer, *self.requests[i + 1 :]))


CALM_SHARE = 0.1
MORE_REQUESTS = 8
"""So many more requests are a load for which nodes change their roles, or prefill nodes answer."""
RANKS_SHARE = 0.2
REFUSED_SHARE = 0.15
WHOLE_SHARE = 0.4
STRANGER_SHARE = 0.25
AT_ONCE_S = 0.5
PREFILL_ANSWERS_FROM = 10_000
"""Seeds below it are older than that prefill nodes answer, and stand for what they have always stood for."""
GROUPS_FROM = 60_000
"""Seeds below it are older than that a cache has several groups."""
DRAFTS_FROM = 70_000
"""Seeds below it are older than drafts, and draft nearly nothing."""
VANISHED_S = 6.0
"""A proxy has dropped a node by then that sends no heartbeats."""


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
    # What clients do beyond this has chances of its own, so that it changes nothing else about a seed.
    chance = Random(f"clients {seed}")
    intrusions = tuple(_intrusion(chance, len(shape.roles)) for _ in range(chance.choice((0, 0, 1, 2))))
    varied = tuple(_varied(chance, request) for request in requests)
    short = tuple(_fault(chance, len(shape.roles), RESOURCES) for _ in range(chance.choice((0, 0, 0, 1, 2))))
    memory = Random(f"memory {seed}")
    refused = (_fault(memory, len(shape.roles), (FaultKind.NO_MEMORY,)),) if memory.random() < REFUSED_SHARE else ()
    plan = Plan(_limited(chance, shape), varied, (*faults, *short, *refused) if faults else (), intrusions)
    if Random(f"calm {seed}").random() < CALM_SHARE:
        plan = plan.calmed()
    else:
        wider = _widened(plan, Random(f"cluster {seed}"))
        if wider is not plan:
            plan = _with_roles(_with_workers(wider, Random(f"workers {seed}")), Random(f"roles {seed}"))
    plan = _stranger(_ranked(plan, Random(f"ranks {seed}")), Random(f"stranger {seed}"))
    if seed >= PREFILL_ANSWERS_FROM:
        plan = _with_answers(plan, Random(f"prefill answers {seed}"))
    if seed >= DRAFTS_FROM:
        plan = _with_drafts(plan, Random(f"drafts {seed}"))
        if Random(f"shape {seed}").random() < WHOLE_SHARE:
            return plan
    return plan if seed < GROUPS_FROM else _with_groups(plan, Random(f"groups {seed}"))


def _limited(random: Random, shape: Shape) -> Shape:
    """Returns the shape with limits that its requests may meet."""
    kind = random.choice(("none", "none", "none", "proxy", "nodes", "deadline", "buffers"))
    match kind:
        case "proxy":
            return replace(shape, max_in_flight=random.choice((1, 2, 4)), max_queued=random.choice((0, 1, 3)))
        case "nodes":
            return replace(shape, max_waiting=random.choice((1, 2)))
        case "deadline":
            return replace(shape, timeout_s=random.choice((1.0, 3.0)))
        case "buffers":
            return replace(shape, buffer_bytes=random.choice((200, 1000)))
    return shape


_OFTEN = tuple(manner for manner in Manner if manner not in (Manner.OFFERS_UPGRADE, Manner.SPEAKS_1_0))


def _varied(random: Random, request: PlannedRequest) -> PlannedRequest:
    """Returns the request with more that a client may ask for, and another manner."""
    if random.random() < 0.5:
        return request
    drawn = random.random() < 0.4
    scored = not request.stream and random.random() < 0.3
    keyed = random.random() < 0.15
    return replace(
        request,
        choices=random.choice((1, 1, 1, 2, 3)),
        seed=random.randrange(1_000) if drawn else None,
        stop_at=random.randrange(0, 12) if random.random() < 0.2 else None,
        priority=random.choice((0, 0, 0, -1, 1, 20)),
        scored=scored,
        max_tokens=0 if scored and random.random() < 0.3 else request.max_tokens,
        manner=Manner.PLAIN if random.random() < 0.6 else random.choice(_OFTEN),
        key=f"key {random.randrange(10**6)}" if keyed else "",
        asks_again_s=random.uniform(0.0, 3.0) if keyed else None,
        tries=random.choice((1, 1, 3)),
    )


def _widened(plan: Plan, random: Random) -> Plan:
    """Returns the plan with more proxies, clients that come back, and more kinds of faults; a third of plans as is."""
    if random.random() < 1 / 3:
        return plan
    proxies = random.choice((1, 2, 2, 3))
    requests = tuple(
        replace(request, proxy=random.randrange(proxies), returns=request.stays and comes_back)
        for request in plan.requests
        for comes_back in (random.random() < 0.4,)
    )
    faults = tuple(replace(fault, proxy=random.randrange(proxies)) for fault in plan.faults)
    more = tuple(_wider_fault(random, len(plan.shape.roles), proxies) for _ in range(random.choice((0, 1, 1, 2, 2, 3))))
    return replace(plan, shape=replace(plan.shape, proxies=proxies), requests=requests, faults=faults + more)


def _with_workers(plan: Plan, random: Random) -> Plan:
    """Returns the plan with several workers at each proxy, to which things happen too; two thirds of plans as is."""
    if random.random() < 2 / 3:
        return plan
    shape = replace(plan.shape, workers=random.choice((2, 2, 3)))
    more = tuple(_worker_fault(random, shape) for _ in range(random.choice((0, 1, 1, 2, 3))))
    return replace(plan, shape=shape, faults=plan.faults + more)


def _with_answers(plan: Plan, random: Random) -> Plan:
    """Returns the plan with prefill nodes that answer, and enough requests for it; half of the plans as is."""
    if random.random() < 0.5:
        return plan
    more = tuple(_varied(random, _request(random)) for _ in range(MORE_REQUESTS))
    return replace(plan, shape=replace(plan.shape, prefill_answers=True), requests=plan.requests + more)


def _with_groups(plan: Plan, random: Random) -> Plan:
    """Returns the plan with a model that has windows, states or both."""
    cache = random.choice((CacheShape.WINDOW, CacheShape.STATE, CacheShape.ALL_KINDS))
    shape = replace(
        plan.shape, cache=cache, window_blocks=random.choice((20, 30, 64)), states=random.choice((6, 12, 32))
    )
    return replace(plan, shape=shape)


def _with_drafts(plan: Plan, random: Random) -> Plan:
    """Returns the plan with nodes that draft, each of them as many tokens as it likes, and a part of them none."""
    numbers = tuple(random.choice((0, 1, 3, 7, 7)) for _ in plan.shape.roles)
    shape = replace(plan.shape, draft_tokens=numbers, right_drafts=random.choice((0.0, 0.5, 0.8, 0.95, 1.0)))
    return replace(plan, shape=shape)


def _with_roles(plan: Plan, random: Random) -> Plan:
    """Returns the plan with four nodes that move between roles by their load; most plans as is."""
    if random.random() < 0.9:
        return plan
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    # A step takes more than the one target, or a prompt waits for longer than the other.
    for_answers = random.random() < 0.5
    shape = replace(
        plan.shape,
        roles=roles,
        target_ttft_ms=5000.0 if for_answers else 1.0,
        target_itl_ms=1000 * plan.shape.step_s * (0.1 if for_answers else 20.0),
    )
    more = tuple(_request(random) for _ in range(MORE_REQUESTS))
    return replace(plan, shape=shape, requests=plan.requests + more)


def _worker_fault(random: Random, shape: Shape) -> Fault:
    return Fault(
        at_s=random.uniform(0.0, 2.5),
        kind=random.choice(AT_WORKER),
        node=0,
        lasts_s=random.choice((0.1, 0.7, 2.0, 5.0)),
        proxy=random.randrange(shape.proxies),
        other=random.randrange(shape.workers),
        amount=int(10 ** random.uniform(0.0, 2.5)),
    )


def _wider_fault(random: Random, nodes: int, proxies: int) -> Fault:
    return Fault(
        at_s=random.uniform(0.0, 2.5),
        kind=random.choice(WIDER),
        node=random.randrange(nodes),
        lasts_s=random.choice((0.0, 0.1, 0.7, 2.0, 5.0)),
        proxy=random.randrange(proxies),
        other=random.randrange(nodes - 1),
        amount=int(10 ** random.uniform(0.0, 2.5)),
    )


def _ranked(plan: Plan, random: Random) -> Plan:
    """Returns the plan with nodes of several ranks and, if it has faults, some of ranks; most plans as they are."""
    if random.random() >= RANKS_SHARE:
        return plan
    sizes = [random.choice((1, 2)) for _ in plan.shape.roles]
    sizes[random.randrange(len(sizes))] = 2
    faults = tuple(_rank_fault(random, len(sizes)) for _ in range(random.choice((0, 1, 2, 2)) if plan.faults else 0))
    shape = replace(plan.shape, tp_sizes=tuple(sizes), kv_heads=random.choice((1, 2, 2, 4)))
    return replace(plan, shape=shape, faults=plan.faults + faults)


def _stranger(plan: Plan, random: Random) -> Plan:
    """Returns the plan with what few clusters meet; most plans, and all calm ones, as they are."""
    if random.random() >= STRANGER_SHARE or plan.is_calm:
        return plan
    shape, nodes = plan.shape, len(plan.shape.roles)
    kinds = {fault.kind for fault in plan.faults}
    at_once = False
    match random.choice(("none", "heartbeats", "connections", "crowd", "short contexts")):
        case "heartbeats" if not shape.moves_roles:
            shape = replace(shape, heartbeat_ms=300)
        case "connections":
            shape, at_once = replace(shape, max_connections=random.choice((2, 3, 4))), True
        case "crowd" if not (plan.faults or shape.moves_roles):
            roles = (Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE)
            shape, at_once = replace(shape, roles=roles, tp_sizes=(), max_num_seqs=1, max_waiting=1), True
        case "short contexts" if not (shape.moves_roles or FaultKind.SET_ROLE in kinds):
            shape = replace(shape, max_prefill_len=16)
    requests = tuple(
        replace(request, manner=random.choice((Manner.OFFERS_UPGRADE, Manner.SPEAKS_1_0)))
        if request.manner is Manner.PLAIN and not request.returns and random.random() < 0.2
        else request
        for request in plan.requests
    )
    intrusions = tuple(
        Intrusion(random.uniform(0.0, 2.5), random.choice(OF_REQUESTS), random.randrange(nodes))
        for _ in range(random.choice((0, 1, 2)))
    )
    faults = tuple(_fault(random, nodes, RARER) for _ in range(random.choice((0, 1, 1)) if plan.faults else 0))
    if any(fault.kind is FaultKind.VANISH for fault in faults):
        # Whoever waits for a host that is gone hears of it only from the registry, which has to see that it is gone.
        faults = tuple(replace(fault, lasts_s=VANISHED_S) for fault in faults)
    else:
        faults = plan.faults + faults
    if at_once:
        requests += tuple(_request(random) for _ in range(MORE_REQUESTS))
        requests = tuple(replace(request, at_s=AT_ONCE_S) for request in requests)
    return replace(plan, shape=shape, requests=requests, intrusions=plan.intrusions + intrusions, faults=faults)


def _rank_fault(random: Random, nodes: int) -> Fault:
    return Fault(
        at_s=random.uniform(0.0, 2.5),
        kind=random.choice(OF_RANKS),
        node=random.randrange(nodes),
        lasts_s=random.choice((0.1, 0.7, 2.0, 5.0)),
        other=random.randrange(2),
        amount=int(10 ** random.uniform(0.0, 2.5)),
    )


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


def _intrusion(random: Random, nodes: int) -> Intrusion:
    return Intrusion(random.uniform(0.0, 2.5), random.choice(OF_TICKETS), random.randrange(nodes))


def _fault(random: Random, nodes: int, kinds: tuple[FaultKind, ...] = FIRST) -> Fault:
    return Fault(
        at_s=random.uniform(0.0, 2.5),
        kind=random.choice(kinds),
        node=random.randrange(nodes),
        lasts_s=random.choice((0.1, 0.7, 2.0, 5.0)),
    )
