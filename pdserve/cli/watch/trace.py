"""``pdserve trace`` shows what happened to a request, and when; or to the slowest requests, or to those that failed.

A timeline is drawn as lines of text: a row for each phase, on one axis of time.
"""

from __future__ import annotations

import http.client
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pdserve.cli.node_commands import KEY_ADVICE, CommandFailed, error_message
from pdserve.config import AdmissionConfig, AskedRequestConfig, RequestTraceConfig, Switch
from pdserve.doctor.cluster import direct_opener
from pdserve.errors import ConfigError
from pdserve.http.tls import Trust, read_authorities
from pdserve.log_format import printable
from pdserve.settings import load
from pdserve.wire.status import IncidentKind, RequestView
from pdserve.wire.timeline import Gaps, Moment, MomentKind, Phase, PhaseKind, ProcessKind, Timeline, TimelinePart
from pdserve_proxy.credentials import read_api_keys
from pdserve_proxy.relay.outcomes import has_failed
from pdserve_proxy.status.report import StatusAnswer, StatusReport

LABEL_CELLS = 26
TEXT_CELLS = 34
MIN_BAR_CELLS = 20

_PROCESSES = {
    ProcessKind.PROXY: "proxy",
    ProcessKind.API: "API process",
    ProcessKind.ENGINE: "engine",
    ProcessKind.PREFILL_ENGINE: "prefill engine",
}
_WENT_ON = (MomentKind.RESUMED, MomentKind.MOVED)


@dataclass(frozen=True, slots=True)
class Marks:
    """What the picture is drawn with."""

    bar: str = "█"
    half: str = "▓"
    gap: str = "░"
    moment: str = "▲"


UNICODE = Marks()
ASCII = Marks("#", "=", ".", "^")


def picture(timeline: Timeline, width: int, marks: Marks = UNICODE) -> Iterator[str]:
    """Yields the lines of the picture, which are ``width`` cells wide if that is enough for it."""
    cells = max(MIN_BAR_CELLS, width - LABEL_CELLS - TEXT_CELLS)
    axis = _Axis(max(timeline.duration_s, 1e-6), cells, marks)
    yield _headline(timeline)
    yield f"{'':{LABEL_CELLS}}{_scale(timeline.duration_s, cells)}"
    for part in timeline.parts:
        yield _part_title(part)
        yield from _rows(part, axis)
    if timeline.silent:
        yield f"No answer from {', '.join(timeline.silent)}: what they did is missing."


@dataclass(frozen=True, slots=True)
class _Axis:
    duration_s: float
    cells: int
    marks: Marks

    def cell(self, at_s: float) -> int:
        return min(self.cells - 1, max(0, int(at_s / self.duration_s * self.cells)))

    def spans(self, parts: Iterable[tuple[float, float, str]]) -> str:
        """Returns a row with each part drawn in its mark; one that is too short for a cell has one, too."""
        row = [" "] * self.cells
        for start_s, end_s, mark in parts:
            first, last = self.cell(start_s), self.cell(end_s)
            # The cell in which the next part begins is that part's.
            for cell in range(first, max(first + 1, last)):
                row[cell] = mark
        return "".join(row)


def _headline(timeline: Timeline) -> str:
    first = timeline.parts[0]
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timeline.began))
    state = f"{first.outcome or '-'} {first.status or ''}".strip() if timeline.finished else "under way"
    tokens = max(timeline.parts, key=lambda part: part.output_tokens)
    # An answer that went on elsewhere has more: each node counts its own tokens, and the first one may be gone.
    went_on = any(moment.kind in _WENT_ON for part in timeline.parts for moment in part.moments)
    counts = f"{tokens.prompt_tokens} + {'at least ' if went_on else ''}{tokens.output_tokens} tokens"
    return f"{timeline.request_id}: {state} in {_shown(timeline.duration_s)}, {counts}, {first.model or '-'}, {began}"


def _scale(duration_s: float, cells: int) -> str:
    middle, end = _shown(duration_s / 2), _shown(duration_s)
    half = cells // 2
    return f"{'0':{half}}{middle:{max(1, cells - half - len(end))}}{end}"


def _part_title(part: TimelinePart) -> str:
    name = f"{part.node} {_PROCESSES[part.process]}".strip()
    notes = []
    if part.clock_error_s:
        notes.append(f"±{_shown(part.clock_error_s)}")
    if part.end_s is None:
        notes.append("under way")
    elif part.outcome and part.process is not ProcessKind.PROXY:
        notes.append(part.outcome)
    if part.cached_tokens:
        notes.append(f"{part.cached_tokens} tokens cached")
    if part.drafts:
        notes.append(f"{part.accepted_drafts} of {part.drafts} drafts accepted")
    if part.left_out:
        notes.append(f"{part.left_out} more not recorded")
    return f"{name} ({', '.join(notes)})" if notes else name


def _rows(part: TimelinePart, axis: _Axis) -> Iterator[str]:
    marks = axis.marks
    chunks = [phase for phase in part.phases if phase.kind is PhaseKind.CHUNK]
    for phase in part.phases:
        if phase.kind is PhaseKind.CHUNK:
            continue
        bar = axis.spans([(phase.start_s, phase.end_s, marks.bar)])
        yield _phase_row(f"{phase.kind.value} {_peers(phase)}", bar, _phase_text(phase))
        if phase.kind is PhaseKind.PREFILL and chunks:
            yield _chunk_row(chunks, axis)
    if chunks and all(phase.kind is not PhaseKind.PREFILL for phase in part.phases):
        yield _chunk_row(chunks, axis)
    by_kind: dict[str, list[Moment]] = defaultdict(list)
    for moment in part.moments:
        by_kind[moment.kind.value].append(moment)
    for kind, moments in by_kind.items():
        bar = axis.spans([(moment.at_s, moment.at_s, marks.moment) for moment in moments])
        yield _phase_row(kind.replace("_", " "), bar, _moments_text(moments))
    if part.gaps is not None:
        gaps = [(gap.start_s, gap.start_s + gap.seconds, marks.gap) for gap in part.gaps.longest]
        yield _phase_row("longest gaps", axis.spans(gaps), _gaps_text(part.gaps))


def _chunk_row(chunks: Sequence[Phase], axis: _Axis) -> str:
    both = (axis.marks.bar, axis.marks.half)
    bar = axis.spans((chunk.start_s, chunk.end_s, both[index % 2]) for index, chunk in enumerate(chunks))
    count = sum(max(1, chunk.chunks) for chunk in chunks)
    return _phase_row("chunks", bar, f"{count}, {sum(chunk.tokens for chunk in chunks)} tokens")


def _phase_row(label: str, bar: str, text: str) -> str:
    label = label.strip()
    return f"  {label[: LABEL_CELLS - 3]:{LABEL_CELLS - 2}}{bar} {text}".rstrip()


def _peers(phase: Phase) -> str:
    return phase.node if phase.prefill in ("", "-") else f"{phase.node}, {phase.prefill}"


def _phase_text(phase: Phase) -> str:
    seconds = phase.end_s - phase.start_s
    parts = [_shown(seconds)]
    if phase.kind is PhaseKind.DECODE and phase.tokens:
        parts.append(f"{phase.tokens} tokens, {_shown(seconds / phase.tokens)} each")
    elif phase.tokens:
        parts.append(f"{phase.tokens} tokens")
    if phase.blocks:
        parts.append(f"{phase.blocks} blocks")
    if phase.moved_bytes:
        parts.append(f"{phase.moved_bytes / 2**20:.1f} MiB")
    if phase.tail_s is not None:
        parts.append(f"tail {_shown(phase.tail_s)}")
    if phase.outcome not in ("", "ok", "landed", "done"):
        parts.append(phase.outcome)
    return ", ".join(parts)


def _moments_text(moments: Sequence[Moment]) -> str:
    first = moments[0]
    parts = [_shown(first.at_s)] if len(moments) == 1 else [f"{len(moments)} times from {_shown(first.at_s)}"]
    if blocks := sum(moment.blocks for moment in moments):
        parts.append(f"{blocks} blocks")
    nodes = dict.fromkeys(moment.node for moment in moments if moment.node)
    if nodes:
        parts.append(", ".join(nodes))
    if gap_s := sum(moment.gap_s or 0.0 for moment in moments):
        parts.append(f"nothing for {_shown(gap_s)}")
    return ", ".join(parts)


def _gaps_text(gaps: Gaps) -> str:
    longest = max(gap.seconds for gap in gaps.longest)
    return f"of {sum(gaps.counts)}, the longest {_shown(longest)}"


def _shown(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


_DESCRIPTION = (
    "pdserve trace REQUEST_ID draws what each process did for a request, on one axis of time. REQUEST_ID is what the "
    "answer's header x-request-id says, and the logs. pdserve trace --slowest N and pdserve trace --failed look for "
    "requests themselves. Exit status 1 if nobody remembers a request."
)
_MAX_ANSWER_BYTES = 64 * 2**20
_HEAD = ("request", "came at", "TTFT", "total", "outcome", "answer at", "prompt at")


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError, and CommandFailed if the proxy does not tell what is asked."""
    config = load(RequestTraceConfig, argv, environ, prog="pdserve trace", description=_DESCRIPTION)
    asked = config.asked
    if sum(map(bool, (asked.request, asked.slowest, asked.failed))) != 1:
        raise ConfigError("which request? Give the x-request-id of its answer, or --slowest N, or --failed")
    proxy = _Proxy(asked, Trust(read_authorities(config.trust.authorities)))
    if asked.request:
        _show(asked, proxy.timeline(asked.request))
        return 0
    return _show_recent(asked, proxy)


def _show_recent(asked: AskedRequestConfig, proxy: _Proxy) -> int:
    """Lists requests and shows the timeline of each; returns 1 if one is missing."""
    report = proxy.status().report
    found = slowest(report, asked.slowest) if asked.slowest else failed(report, asked.failed)
    is_picture = asked.json is Switch.OFF
    if not found:
        which = "has ended" if asked.slowest else "has failed"
        print(f"no request {which} that {asked.proxy_url} remembers", file=sys.stderr)
    elif is_picture:
        print(printable("\n".join(table(found))))
    missing = 0
    for one in found:
        if is_picture:
            print()
        try:
            _show(asked, proxy.timeline(one.id))
        except CommandFailed as exc:
            missing += 1
            print(printable(f"{one.id}: {exc}"), file=sys.stderr)
    return int(missing > 0)


def _show(asked: AskedRequestConfig, body: bytes) -> None:
    if asked.json is Switch.ON:
        print(body.decode())
        return
    try:
        timeline = msgspec.json.decode(body, type=Timeline)
    except msgspec.MsgspecError as exc:
        raise CommandFailed(f"{asked.proxy_url} gave no timeline: {exc}") from exc
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    for line in picture(timeline, shutil.get_terminal_size((120, 40)).columns, UNICODE if unicode else ASCII):
        print(printable(line))


class _Proxy:
    """The proxy that had the requests."""

    def __init__(self, asked: AskedRequestConfig, trust: Trust) -> None:
        """Raises ConfigError for a wrong URL or key."""
        self._url = asked.proxy_url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"--proxy-url: {asked.proxy_url!r} was given; it takes a URL like http://127.0.0.1:8000")
        keys = read_api_keys(AdmissionConfig(api_keys=asked.api_keys, api_key_file=asked.api_key_file))
        self._headers = {"authorization": f"Bearer {keys[0].key}"} if keys else {}
        self._opener = direct_opener(trust)
        self._timeout_s = asked.timeout_s

    def timeline(self, request_id: str) -> bytes:
        """Returns the timeline as JSON. Raises CommandFailed."""
        return self._get(f"/requests/{urllib.parse.quote(request_id, safe='')}/timeline")

    def status(self) -> StatusAnswer:
        """Raises CommandFailed."""
        try:
            return msgspec.json.decode(self._get("/status"), type=StatusAnswer)
        except msgspec.MsgspecError as exc:
            raise CommandFailed(f"{self._url} is no proxy of this version: {exc}") from exc

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(f"{self._url}{path}", None, self._headers)  # noqa: S310  # it begins with http
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                body: bytes = response.read(_MAX_ANSWER_BYTES)
                return body
        except urllib.error.HTTPError as exc:
            with exc:
                raise CommandFailed(_message(exc)) from exc
        except urllib.error.URLError as exc:
            raise CommandFailed(f"no answer from {self._url}: {exc.reason}") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise CommandFailed(f"no answer from {self._url}: {exc}") from exc


def _message(error: urllib.error.HTTPError) -> str:
    body = error.read(64 * 1024)
    advice = f"; {KEY_ADVICE}" if error.code == http.client.UNAUTHORIZED else ""
    return (error_message(body) or f"the proxy answers with status {error.code}") + advice


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One request that has ended, as far as the proxy's status has it."""

    id: str
    came: float
    """Seconds since 1970; for a failure that only the incidents have, when it failed."""
    ttft_s: float | None = None
    total_s: float | None = None
    outcome: str = ""
    decode: str = ""
    prefill: str = ""
    why: str = ""
    """Why it failed, as the incidents have it."""


def slowest(report: StatusReport, count: int) -> list[RecentRequest]:
    """Returns the requests that took longest, the slowest first, of those that the status lists."""
    found = [_recent(one, report) for one in report.ended]
    return sorted(found, key=lambda one: one.total_s or 0.0, reverse=True)[:count]


def failed(report: StatusReport, count: int) -> list[RecentRequest]:
    """Returns the requests that the cluster failed last, the newest first.

    An incident names the last request that it happened to, which may have left the status's list since.
    """
    incidents = [one for one in report.incidents if one.kind is IncidentKind.REQUEST_FAILED and one.request]
    why = {one.request: one.text for one in incidents}
    listed = [
        _recent(one, report, why.get(one.request_id, "")) for one in report.ended if has_failed(one.status, one.outcome)
    ]
    known = {one.id for one in listed}
    others = [
        RecentRequest(one.request, _unix_s(one.at_s, report), decode=one.node, why=one.text)
        for one in incidents
        if one.request not in known
    ]
    return sorted([*listed, *others], key=lambda one: one.came, reverse=True)[:count]


def _recent(one: RequestView, report: StatusReport, why: str = "") -> RecentRequest:
    first_s = one.prompt_done_s if one.first_token else None
    outcome = f"{one.outcome} {one.status}" if one.status else one.outcome
    return RecentRequest(
        one.request_id,
        _unix_s(one.arrived_s, report),
        None if first_s is None else first_s - one.arrived_s,
        None if one.ended_s is None else one.ended_s - one.arrived_s,
        outcome,
        one.decode,
        one.prefill,
        why,
    )


def _unix_s(at_s: float, report: StatusReport) -> float:
    return report.unix_s - (report.now_s - at_s)


def table(requests: Sequence[RecentRequest]) -> Iterator[str]:
    """Yields the lines of a table, with a line below each request that says why it failed."""
    rows = [_HEAD, *map(_row, requests)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, one in zip(rows, (None, *requests), strict=True):
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        if one is not None and one.why:
            yield f"    {one.why}"


def _row(one: RecentRequest) -> tuple[str, ...]:
    came = time.strftime("%H:%M:%S", time.localtime(one.came))
    return (one.id, came, _time(one.ttft_s), _time(one.total_s), one.outcome, one.decode or "-", one.prefill or "-")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
