"""The report on the cluster: nodes, requests, rates, latencies and incidents, made when somebody asks for it.

``StatusReport`` is the JSON of ``/status``. Times that end in ``_s`` beside ``now_s`` are on the same clock as that.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice

import msgspec

from pdserve.wire.cache_groups import Keep
from pdserve.wire.discovery import Capacity, NodeLoad, used_share
from pdserve.wire.status import Incident, RelayStatus, RequestProgress, RequestStage, RequestView
from pdserve.wire.version import INSTALLED_VERSION
from pdserve_proxy.recent import STEP_S, STEPS, RecentCounts, last_incidents, step_of
from pdserve_proxy.records.access_log import MAX_RECENT, RequestCounts
from pdserve_proxy.records.relay_record import RelayRecord
from pdserve_proxy.registry.snapshot import RegisteredNode, Snapshot
from pdserve_proxy.relay.outcomes import RelayOutcome, has_failed
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.status.throughput import SHARES, Percentiles, Throughput

MAX_NODES_SHOWN = 256
MAX_UNDER_WAY_SHOWN = 64
MAX_ENDED_SHOWN = 64
RATE_S = 10.0
"""Rates are over so many seconds."""
SHORTEST_S = 0.02
"""As far back as a process remembers its ended requests, at least, however many there are."""
DEAR_S = 0.02
"""A report that takes less of the processor is made for each who looks."""
SHOWN_TIMES = 10
"""A report is shown for so many times as long as it took to make."""
LONGEST_SHOWN_S = 1.0
WINDOW_S = 60.0
"""Percentiles are over so many seconds."""


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group of a node."""

    name: str
    keep: Keep
    window: int
    """In tokens; 0 without a window."""
    used_blocks: int
    num_blocks: int
    block_bytes: int
    """On all ranks together; 0 for a group that no layer has keys and values in."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One registered node."""

    boot_id: str
    name: str
    role: str
    state: str
    model: str
    url: str
    version: str
    protocol: int
    kernels: str
    running: int
    waiting: int
    max_running: int
    kv_used: float | None
    """The share of its KV blocks in use, in the cache group that has least left; None before its first heartbeat."""
    cache_groups: tuple[GroupStatus, ...] = ()
    """All cache groups of a node that has several, that of whole contexts first."""
    queue_s: float
    step_s: float
    heartbeat_age_s: float
    links: dict[str, int]
    """How many links of its engine move blocks by each kind of transport."""
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    accepted_drafts_per_s: float = 0.0
    """Those generated tokens that were guessed ahead."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster does in a second; None where that is not known yet."""

    requests_per_s: float
    failures_per_s: float
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """The times that clients notice."""

    ttft: Percentiles
    """From a request's arrival at the proxy to its first token there."""
    itl: Percentiles
    """Between two tokens of an answer, where they leave the node."""
    e2e: Percentiles
    """From a request's arrival at the proxy to its end, of those that were answered."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster has done in each of the last steps of time that are over, the oldest first."""

    step_s: int = STEP_S
    """How many seconds a step takes."""
    requests_per_s: tuple[float, ...] = ()
    generated_tokens_per_s: tuple[float, ...] = ()


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster as one proxy knows it."""

    version: str
    unix_s: float
    now_s: float
    """The present time on the clock of the requests and incidents."""
    uptime_s: float
    workers: int
    heartbeat_s: float
    """How often a node should be heard of."""
    nodes: tuple[NodeStatus, ...]
    nodes_left_out: int
    stages: dict[RequestStage, int]
    """How many requests are under way at each stage."""
    under_way: tuple[RequestView, ...]
    under_way_left_out: int
    ended: tuple[RequestView, ...]
    """The requests that ended last, the last one at the end."""
    outcomes: dict[str, int]
    rates: Rates
    latencies: Latencies
    incidents: tuple[Incident, ...]
    """The last one is at the end."""
    history: History = History()


class StatusAnswer(msgspec.Struct, frozen=True):
    """What ``/status`` answers one caller."""

    may_command: bool
    """Whether the caller's key lets it command nodes."""
    report: StatusReport


def relay_status(counts: RequestCounts) -> RelayStatus:
    """Returns what one process of a proxy knows of its requests."""
    stages = Counter(stage_of(relayed) for relayed in counts.under_way)
    return RelayStatus(
        stages=dict(stages),
        under_way=tuple([request_view(relayed.record()) for relayed in islice(counts.under_way, MAX_UNDER_WAY_SHOWN)]),
        ended=tuple(map(request_view, counts.recent)),
        outcomes=dict(counts.outcomes),
        incidents=counts.incidents.newest(),
        ended_by_step=counts.ended_lately.by_step(),
    )


class Reporter:
    """Makes the reports of one proxy."""

    def __init__(
        self, heartbeat_s: float, generated: RecentCounts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``generated`` counts the tokens of all nodes."""
        self._heartbeat_s = heartbeat_s
        self._generated = generated
        self._clock = clock
        self._started_s = clock()
        self._throughput = Throughput(RATE_S, WINDOW_S)

    def report(self, snapshot: Snapshot, parts: Sequence[RelayStatus], workers: int = 1) -> StatusReport:
        """Returns the report on the nodes of ``snapshot`` and the requests of all processes."""
        now = self._clock()
        self._throughput.note(snapshot.nodes)
        under_way = sorted((one for part in parts for one in part.under_way), key=lambda one: one.arrived_s)
        ended = sorted((one for part in parts for one in part.ended), key=lambda one: one.ended_s or 0.0)
        stages = sum((Counter(part.stages) for part in parts), Counter[RequestStage]())
        outcomes = sum((Counter(part.outcomes) for part in parts), Counter[str]())
        nodes = tuple(self._node(node, now) for node in snapshot.nodes[:MAX_NODES_SHOWN])
        shown = tuple(under_way[:MAX_UNDER_WAY_SHOWN])
        return StatusReport(
            version=INSTALLED_VERSION,
            unix_s=time.time(),
            now_s=now,
            uptime_s=now - self._started_s,
            workers=workers,
            heartbeat_s=self._heartbeat_s,
            nodes=nodes,
            nodes_left_out=len(snapshot.nodes) - len(nodes),
            stages=dict(stages),
            under_way=shown,
            under_way_left_out=stages.total() - len(shown),
            ended=tuple(ended[-MAX_ENDED_SHOWN:]),
            outcomes=dict(outcomes),
            rates=self._rates(parts, now),
            latencies=self._latencies(ended, now),
            incidents=last_incidents(part.incidents for part in parts),
            history=self._history(parts, now),
        )

    def _node(self, node: RegisteredNode, now: float) -> NodeStatus:
        info, load = node.info, node.load
        rates = self._throughput.rates_of(info.boot_id)
        used = used_share(info.capacity, load)
        return NodeStatus(
            boot_id=info.boot_id.hex(),
            name=info.name,
            role=info.role.value,
            state=node.state.value,
            model=info.model,
            url=info.url,
            version=info.version,
            protocol=info.protocol,
            kernels=info.kernels,
            running=load.running,
            waiting=load.waiting,
            max_running=info.capacity.max_running,
            kv_used=used,
            cache_groups=() if used is None else _groups(info.capacity, load),
            queue_s=load.queue_s,
            step_s=load.step_s,
            heartbeat_age_s=max(0.0, now - node.seen_s),
            links={kind: number for kind, number in msgspec.structs.asdict(load.links).items() if number},
            prompt_tokens_per_s=rates.prompt,
            generated_tokens_per_s=rates.generated,
            accepted_drafts_per_s=rates.accepted_drafts,
        )

    def _rates(self, parts: Iterable[RelayStatus], now: float) -> Rates:
        requests = failures = 0.0
        for part in parts:
            window_s = max(min(RATE_S, now - self._started_s), 1.0)
            if len(part.ended) == MAX_RECENT:  # there may have been more, which this process has forgotten
                window_s = max(min(window_s, now - _ended_s(part.ended[0])), SHORTEST_S)
            fresh = _since(part.ended, now - window_s)
            requests += len(fresh) / window_s
            failures += sum(has_failed(one.status, one.outcome) for one in fresh) / window_s
        tokens = self._throughput.total()
        return Rates(
            requests_per_s=requests,
            failures_per_s=failures,
            prompt_tokens_per_s=tokens.prompt,
            generated_tokens_per_s=tokens.generated,
        )

    def _history(self, parts: Iterable[RelayStatus], now: float) -> History:
        ended = sum((Counter(part.ended_by_step) for part in parts), Counter[int]())
        generated = self._generated.by_step()
        steps = range(max(step_of(self._started_s), step_of(now) - STEPS), step_of(now))
        return History(
            requests_per_s=tuple([ended[step] / STEP_S for step in steps]),
            generated_tokens_per_s=tuple([generated.get(step, 0) / STEP_S for step in steps]),
        )

    def _latencies(self, ended: Sequence[RequestView], now: float) -> Latencies:
        answered = [one for one in _since(ended, now - WINDOW_S) if one.outcome == RelayOutcome.OK]
        first_tokens = [
            one.prompt_done_s - one.arrived_s for one in answered if one.first_token and one.prompt_done_s is not None
        ]
        return Latencies(
            ttft=percentiles(first_tokens),
            itl=self._throughput.gaps(),
            e2e=percentiles([_ended_s(one) - one.arrived_s for one in answered]),
        )


def _groups(capacity: Capacity, load: NodeLoad) -> tuple[GroupStatus, ...]:
    free = (load.free_blocks, *load.bounded_free_blocks)
    return tuple(
        GroupStatus(
            name=group.name,
            keep=group.keep,
            window=group.window,
            used_blocks=max(0, group.num_blocks - left),
            num_blocks=group.num_blocks,
            block_bytes=group.block_bytes,
        )
        for group, left in zip(capacity.groups, free, strict=False)
    )


class SharedReport:
    """Makes one report for all who look at about the same time.

    Whoever looks while one is made waits for that. One that took much computing is shown for ten times as long, so
    that no number of viewers takes much more than a tenth of the process's time from its requests.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[bytes]],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._make = make
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._last = b""
        self._until_s = -math.inf
        self._making: asyncio.Task[bytes] | None = None

    async def __call__(self) -> bytes:
        """Returns the report as JSON. Raises what its making raises."""
        if self._making is None:
            if self._clock() < self._until_s:
                return self._last
            self._making = asyncio.create_task(self._made())
            self._making.add_done_callback(_note_end)
        return await asyncio.shield(self._making)

    async def _made(self) -> bytes:
        began_s = self._cpu_clock()
        try:
            self._last = await self._make()
        finally:
            self._making = None
        took_s = self._cpu_clock() - began_s
        if took_s >= DEAR_S:
            self._until_s = self._clock() + min(took_s * SHOWN_TIMES, LONGEST_SHOWN_S)
        return self._last


def _note_end(making: asyncio.Task[bytes]) -> None:
    """Sees a failure that nobody waits for any more, which asyncio would complain of."""
    if not making.cancelled():
        making.exception()


def percentiles(values: Iterable[float]) -> Percentiles:
    """Returns the percentiles of ``values``, each of which is one of them (the nearest rank)."""
    ordered = sorted(values)
    if not ordered:
        return Percentiles()
    return Percentiles(*[ordered[max(0, math.ceil(len(ordered) * share) - 1)] for share in SHARES])


def _since(ended: Sequence[RequestView], from_s: float) -> list[RequestView]:
    return [one for one in ended if _ended_s(one) >= from_s]


def _ended_s(one: RequestView) -> float:
    return one.arrived_s if one.ended_s is None else one.ended_s


_PROGRESS_FIELDS = len(RequestProgress.__struct_fields__)
# A report has many requests that have ended, and a look-up on the enum's class would be most of what each costs.
_ENDED = RequestStage.ENDED


def stage_of(request: RelayRecord | RelayedRequest) -> RequestStage:
    if request.ended_s is not None:
        return _ENDED
    if request.resuming:
        return RequestStage.RESUMING
    if request.sent_s is None:
        return RequestStage.QUEUED
    return RequestStage.PROMPT if request.prompt_done_s is None else RequestStage.ANSWER


def request_view(record: RelayRecord) -> RequestView:
    """Returns what those who watch the cluster see of a relayed request."""
    nodes = record.nodes
    decode = prefill = ""
    if nodes is not None:
        decode = nodes.decode.name
        if nodes.prefill:
            prefill = nodes.prefill[0].name
    # Both begin with the fields of the progress.
    progress = msgspec.structs.astuple(record)[:_PROGRESS_FIELDS]
    return RequestView(*progress, stage=stage_of(record), decode=decode, prefill=prefill)
