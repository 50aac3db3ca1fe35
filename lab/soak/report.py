"""What a soak has shown, as figures that can be kept, and the verdict on them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lab.soak.clients import PATIENCE_S, Cause, Finding, Outcome
from lab.soak.faults import KILLS, is_old
from lab.soak.observing import Held, Look
from lab.soak.run import Rest, Soak
from pdserve.bench.report import Machine, this_machine

MAX_NEW_FILES = 32
"""A process may hold so many descriptors more in the end than in the beginning: those of two links to other engines. A
leak of one in each fault is many times as many in an hour."""
MAX_NEW_THREADS = 8
"""Pools fill as they are used: asyncio's has up to four threads more than there are cores, that of grammars one. A node
may get its first request of a kind late, with another role. A leak of one in each fault is many times as many."""
MAX_GROWTH_MIB = 0.5
"""A process may grow by so much in 1,000 requests, by a line through the spans of its life, once it is warm."""
NOISE_MIB = 8.0
"""A process may grow by so much in all: what is allocated and freed leaves holes."""
WARM_SPANS = 1
"""Spans of a process that are no measure of it: caches fill, and libraries load what they use."""
MIN_SPANS = 3
JUDGED_FROM_MINUTES = 30.0
"""A soak that is at least so long has to have processes that lived long enough to be judged."""
MAX_FILES = 32
"""Files that the processes of six servers may have in shared memory, or among temporary ones."""
MAX_TORN_PER_KILL = 0.1
"""UCX makes a file in shared memory for each worker, and removes its name milliseconds later. A process that is killed
in between leaves the file. If more kills than one in ten leave one, it is a leak."""
UCX_FILES = "ucx_shm_posix_"
MOST_NOT_KEPT = 50
"""Clients that ask again may find that their answers are not kept: so many of them, or one in so many of them."""
_KEPT_EVERY_S = 30.0


class Line(msgspec.Struct, frozen=True):
    """One line of the verdict."""

    ok: bool
    text: str


class FaultRow(msgspec.Struct, frozen=True):
    """All faults of one kind, on one part of the cluster."""

    part: str
    fault: str
    count: int
    recovery_p50_s: float
    """From the end of the fault until the server serves again, in its own role, at both proxies."""
    recovery_max_s: float


class RestRow(msgspec.Struct, frozen=True):
    """What was held at a rest."""

    at_s: float
    asked: int
    idle_after_s: float
    busy: str
    held: dict[str, Held]


class Series(msgspec.Struct, frozen=True):
    """One process over time, one number for each time of the report; ``None`` while there is no such process."""

    pid: list[int | None]
    files: list[int | None]
    threads: list[int | None]
    own_mib: list[float | None]
    rss_mib: list[float | None]
    pss_mib: list[float | None]


class ServerSeries(msgspec.Struct, frozen=True):
    """What a server says of itself over time."""

    requests: list[float | None]
    blocks_used: list[float | None]
    blocks_quarantined: list[float | None]


class SoakReport(msgspec.Struct, frozen=True):
    """One soak."""

    machine: Machine
    minutes: float
    seed: int
    clients: int
    verdict: list[Line]
    outcomes: dict[str, int]
    manners: dict[str, int]
    asked_again: dict[str, int]
    kinds: dict[str, int]
    tokens: int
    longest_s: float
    faults: list[FaultRow]
    findings: list[Finding]
    surprises: list[str]
    rests: list[RestRow]
    fault_times: list[tuple[float, str, str]]
    """When a fault came, to which server, and which one."""
    at_s: list[float]
    asked: list[int]
    shared_files: list[int]
    processes: dict[str, Series]
    servers: dict[str, ServerSeries]

    @property
    def ok(self) -> bool:
        return all(line.ok for line in self.verdict)


def to_report(soak: Soak) -> SoakReport:
    """Returns the figures of a soak that has run, and the verdict."""
    looks = _thinned(soak.looks)
    names = sorted({name for look in looks for name in look.held})
    servers = sorted({name for look in looks for name in look.inside})
    tally = soak.tally
    return SoakReport(
        machine=this_machine(),
        minutes=soak.plan.minutes,
        seed=soak.plan.seed,
        clients=soak.plan.clients,
        verdict=verdict(soak),
        outcomes={outcome.value: tally.outcomes[outcome] for outcome in Outcome},
        manners={manner.value: count for manner, count in tally.manners.most_common()},
        asked_again={cause.value: tally.causes[cause] for cause in Cause},
        kinds=dict(sorted(tally.kinds.items())),
        tokens=tally.tokens,
        longest_s=round(tally.longest_s, 1),
        faults=fault_rows(soak),
        findings=tally.findings,
        surprises=soak.surprises,
        rests=[
            RestRow(round(rest.look.at_s, 1), rest.look.asked, round(rest.idle_after_s, 1), rest.busy, rest.look.held)
            for rest in soak.rests
        ],
        fault_times=[(round(strike.at - soak.began, 1), strike.server, strike.fault.value) for strike in soak.strikes],
        at_s=[round(look.at_s, 1) for look in looks],
        asked=[look.asked for look in looks],
        shared_files=[look.shared_files for look in looks],
        processes={name: _series([look.held.get(name) for look in looks]) for name in names},
        servers={name: _server_series(name, looks) for name in servers},
    )


def _series(held: Sequence[Held | None]) -> Series:
    return Series(
        pid=[None if found is None else found.pid for found in held],
        files=[None if found is None else found.files for found in held],
        threads=[None if found is None else found.threads for found in held],
        own_mib=[None if found is None else round(found.own_mib, 1) for found in held],
        rss_mib=[None if found is None else round(found.rss_mib, 1) for found in held],
        pss_mib=[None if found is None else round(found.pss_mib, 1) for found in held],
    )


def _server_series(name: str, looks: Sequence[Look]) -> ServerSeries:
    said = [look.inside.get(name) for look in looks]
    return ServerSeries(
        requests=[None if found is None else found.requests for found in said],
        blocks_used=[None if found is None else round(found.blocks_used, 3) for found in said],
        blocks_quarantined=[None if found is None else found.blocks_quarantined for found in said],
    )


def _thinned(looks: Sequence[Look]) -> list[Look]:
    """Returns one look for each ``_KEPT_EVERY_S``, or all of a short run: a page needs no more."""
    if not looks or looks[-1].at_s < 30 * _KEPT_EVERY_S:
        return list(looks)
    kept = [looks[0]]
    for look in looks:
        if look.at_s - kept[-1].at_s >= _KEPT_EVERY_S:
            kept.append(look)
    return kept


def fault_rows(soak: Soak) -> list[FaultRow]:
    grouped = defaultdict[tuple[str, str], list[float]](list)
    for strike in soak.strikes:
        grouped[(strike.part.value, strike.fault.value)].append(strike.recovery_s)
    return [
        FaultRow(part, fault, len(times), round(statistics.median(times), 1), round(max(times), 1))
        for (part, fault), times in sorted(grouped.items())
    ]


def verdict(soak: Soak) -> list[Line]:
    """Returns the verdict, in about ten lines. The soak has passed if all of them are well."""
    return [
        *_on_its_end(soak),
        *_on_answers(soak),
        *_on_faults(soak),
        _on_drafts(soak),
        *_on_rests(soak.rests),
        *_on_growth(soak),
        _on_what_is_left(soak),
    ]


def _on_its_end(soak: Soak) -> Iterator[Line]:
    if soak.broke_off:
        yield Line(False, f"the run ended early: {soak.broke_off}")


def _on_answers(soak: Soak) -> Iterator[Line]:
    counts, tally = soak.tally.outcomes, soak.tally
    yield Line(
        counts[Outcome.RIGHT] > 0,
        f"{counts.total()} requests of {soak.asks} kinds in {soak.seconds / 60:.1f} minutes: "
        f"{counts[Outcome.RIGHT]} right ({tally.tokens} tokens), {counts[Outcome.LEFT]} whose clients left, "
        f"{counts[Outcome.REFUSED]} refused as nonsense"
        + (f"; rounding decides {soak.unsteady} more, which are not asked" if soak.unsteady else ""),
    )
    for outcome in (Outcome.WRONG, Outcome.LOST):
        shown = [f"{found.ask}: {found.what[:120]}" for found in tally.findings if found.outcome is outcome]
        yield Line(
            counts[outcome] == 0, f"{counts[outcome]} {outcome.value}" + "".join(f"; {words}" for words in shown[:3])
        )
    again = ", ".join(f"{tally.causes[cause]} because {cause.value}" for cause in Cause)
    broken = sum(tally.causes[cause] for cause in Cause)
    yield Line(
        tally.longest_s < PATIENCE_S and tally.causes[Cause.NOT_KEPT] <= max(MOST_NOT_KEPT, broken / MOST_NOT_KEPT),
        f"clients asked again: {again}; the longest took {tally.longest_s:.1f} s in all",
    )


def _on_faults(soak: Soak) -> Iterator[Line]:
    counts = Counter(strike.part.value for strike in soak.strikes)
    failed = [f"{strike.server} {strike.fault.value}: {strike.failure}" for strike in soak.strikes if strike.failure]
    slowest = max((strike.recovery_s for strike in soak.strikes), default=0.0)
    parts = ", ".join(f"{count} on {part}" for part, count in sorted(counts.items()))
    yield Line(
        not failed,
        f"{len(soak.strikes)} faults ({parts}); whole again {slowest:.1f} s after each at the latest"
        + "".join(f"; {words}" for words in failed[:3]),
    )
    surprises = "".join(f"; {words[:300]}" for words in soak.surprises[:3])
    yield Line(
        not soak.surprises, f"{len(soak.surprises)} processes ended, or logged a defect, without a fault{surprises}"
    )


def accepted_drafts(looks: Sequence[Look]) -> float:
    """Returns how many drafts all nodes have accepted, as far as looks have seen it before nodes ended."""
    total, last = 0.0, defaultdict[str, float](float)
    for look in looks:
        for name, inside in look.inside.items():
            # A node that was started again counts from 0.
            since = last[name] if inside.accepted_drafts >= last[name] else 0.0
            total += inside.accepted_drafts - since
            last[name] = inside.accepted_drafts
    return total


def _on_drafts(soak: Soak) -> Line:
    accepted = accepted_drafts(soak.looks)
    return Line(accepted > 0, f"{accepted:.0f} drafts of next tokens accepted; one decode node has --speculation off")


def _on_rests(rests: Sequence[Rest]) -> Iterator[Line]:
    busy = [rest for rest in rests if rest.busy]
    slowest = max((rest.idle_after_s for rest in rests), default=0.0)
    yield Line(
        bool(rests) and not busy,
        f"{len(rests)} rests: every KV block free, none quarantined, no request, journal or kept answer, "
        f"after {slowest:.1f} s at the latest"
        + "".join(f"; not at {rest.look.at_s:.0f} s: {rest.busy}" for rest in busy[:3]),
    )


class Least(msgspec.Struct, frozen=True):
    """The least that a process held at any look in one span, from one rest to the next: what it never gave back."""

    asked: int
    files: int
    threads: int
    own_mib: float


@dataclass(frozen=True)
class Life:
    """One process in the spans that it has lived through, but those in which it was not warm."""

    name: str
    spans: Sequence[Least]

    @property
    def new_files(self) -> int:
        return self.spans[-1].files - self.spans[0].files

    @property
    def new_threads(self) -> int:
        return self.spans[-1].threads - self.spans[0].threads

    @property
    def growth_mib(self) -> float:
        """The growth in 1,000 requests, by the line that fits best."""
        thousands = [span.asked / 1000 for span in self.spans]
        return statistics.linear_regression(thousands, [span.own_mib for span in self.spans]).slope

    @property
    def step_mib(self) -> float:
        """The most by which it has grown from one span to the next: what grows with requests has no large steps."""
        return max(after.own_mib - before.own_mib for before, after in itertools.pairwise(self.spans))

    @property
    def too_much_mib(self) -> float:
        """By how much it has grown more than it may; below 0 if it has not."""
        thousands = (self.spans[-1].asked - self.spans[0].asked) / 1000
        return (self.growth_mib - MAX_GROWTH_MIB) * thousands - NOISE_MIB


def lives(soak: Soak) -> list[Life]:
    """Returns the processes that have lived through enough spans to be judged."""
    found = defaultdict[tuple[str, int], list[Least]](list)
    for before, after in itertools.pairwise(rest.look for rest in soak.rests):
        looks = [before, after, *(look for look in soak.looks if before.at_s < look.at_s < after.at_s)]
        for name, held in after.held.items():
            if name in before.held and before.held[name].pid == held.pid:
                seen = [look.held[name] for look in looks if name in look.held]
                found[(name, held.pid)].append(_least(after.asked, seen))
    return [
        Life(name, spans[WARM_SPANS:]) for (name, _), spans in found.items() if len(spans) >= WARM_SPANS + MIN_SPANS
    ]


def _least(asked: int, seen: Sequence[Held]) -> Least:
    return Least(
        asked,
        min(held.files for held in seen),
        min(held.threads for held in seen),
        min(held.own_mib for held in seen),
    )


def _on_growth(soak: Soak) -> Iterator[Line]:
    judged = lives(soak)
    old = sum(is_old(life.name.split()[0]) for life in judged)
    among = f"of {len(judged)} processes that lived through {WARM_SPANS + MIN_SPANS} spans ({old} of them never ended)"
    files = max(judged, key=lambda life: life.new_files, default=None)
    threads = max(judged, key=lambda life: life.new_threads, default=None)
    grown = max(judged, key=lambda life: life.too_much_mib, default=None)
    if files is None or threads is None or grown is None:
        short = soak.plan.minutes < JUDGED_FROM_MINUTES
        yield Line(short, "no process lived long enough to judge descriptors, threads and memory")
        return
    yield Line(
        files.new_files <= MAX_NEW_FILES and threads.new_threads <= MAX_NEW_THREADS,
        f"{among}, {files.name} has the most new descriptors ({files.new_files:+d}, {MAX_NEW_FILES} may be) and "
        f"{threads.name} the most new threads ({threads.new_threads:+d}, {MAX_NEW_THREADS} may be)",
    )
    yield Line(
        grown.too_much_mib <= 0,
        f"{among}, {grown.name} grows most: {grown.growth_mib:+.2f} MiB in 1,000 requests, from "
        f"{grown.spans[0].own_mib:.0f} to {grown.spans[-1].own_mib:.0f} MiB, by {grown.step_mib:.1f} MiB from one rest "
        f"to the next at most ({MAX_GROWTH_MIB:g} in 1,000 requests and {NOISE_MIB:g} MiB in all may be)",
    )


def _on_what_is_left(soak: Soak) -> Line:
    shared = max((rest.look.shared_files for rest in soak.rests), default=0)
    temporary = max((rest.look.temporary_files for rest in soak.rests), default=0)
    torn = sum(UCX_FILES in path for path in soak.left_at_end)
    others = [path for path in soak.left_at_end if UCX_FILES not in path]
    kills = sum(strike.fault in KILLS for strike in soak.strikes)
    may_be = math.ceil(MAX_TORN_PER_KILL * kills)
    return Line(
        not others and torn <= may_be and shared <= MAX_FILES and temporary <= MAX_FILES,
        f"at a rest, {shared} files of shared memory and {temporary} temporary ones at most ({MAX_FILES} may be); "
        f"left behind at the end: {', '.join(others[:3]) or 'nothing'}, and {torn} files that UCX had just made in a "
        f"process that was killed ({may_be} may be after {kills} kills)",
    )


def write(report: SoakReport, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=0) + b"\n")


def read(path: Path) -> SoakReport:
    return msgspec.json.decode(path.read_bytes(), type=SoakReport)


def show(verdict: Sequence[Line]) -> str:
    return "\n".join(f"{'ok    ' if line.ok else 'FAILED'}  {line.text}" for line in verdict)


def counted(values: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in values.items() if count)
