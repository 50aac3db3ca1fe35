"""Draws a report on the cluster as lines of text.

What nodes and clients have named is shown without characters that a terminal would obey.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.printable import printable_line
from pdserve.wire.status import Incident, IncidentKind, SeenRequest
from pdserve_proxy.status.report import NodeStatus, StatusReport
from pdserve_proxy.status.throughput import Percentiles

BAR_CHARS = 10
PLAIN_INCIDENTS = 10
"""The number of incidents where the height does not say how many lines there are."""
PLAIN_REQUESTS = 16
LEAST_INCIDENTS = 3
"""So many are shown, however many nodes there are."""
MIN_WIDTH = 20
_BOLD, _QUIET, _RED, _YELLOW, _END = "1", "2", "31", "33", "0"
_GRAVE = frozenset({IncidentKind.REQUEST_FAILED, IncidentKind.ATTEMPT_FAILED, IncidentKind.NODE_LOST})
_NOTED = frozenset({IncidentKind.RESUMED, IncidentKind.NODE_DRAINS})


@dataclass(frozen=True, slots=True)
class ScreenSize:
    width: int
    height: int | None
    """The number of lines; None if there may be any number."""
    colour: bool


def render(report: StatusReport, screen: ScreenSize, url: str, note: str = "") -> list[str]:
    """Returns the lines of a screen, at least one. ``note`` says what is wrong with the report itself."""
    lines = [_head(report, url), *([(_RED, printable_line(note))] if note else []), (_QUIET, "")]
    lines += [*_rates(report), (_QUIET, ""), *_latencies(report), (_QUIET, "")]
    happened = min(len(report.incidents), LEAST_INCIDENTS)
    spared = 2 + happened if happened else 0
    lines += _nodes(report, None if screen.height is None else screen.height - len(lines) - spared)
    lines_left = None if screen.height is None else max(0, screen.height - len(lines))
    lines += _requests(report, PLAIN_REQUESTS if lines_left is None else lines_left // 2 - 2)
    lines_left = None if screen.height is None else max(0, screen.height - len(lines))
    lines += _incidents(report, PLAIN_INCIDENTS if lines_left is None else lines_left - 2)
    shown = lines if screen.height is None else lines[: max(screen.height, 1)]
    return [_cut(style, text, screen) for style, text in shown]


_Line = tuple[str, str]
"""A style and a text."""


def _head(report: StatusReport, url: str) -> _Line:
    at = time.strftime("%H:%M:%S", time.localtime(report.unix_s))
    workers = f" · {report.workers} workers" if report.workers > 1 else ""
    return _BOLD, f"pdserve {printable_line(report.version)} · up {duration(report.uptime_s)}{workers} · {url} · {at}"


def _rates(report: StatusReport) -> list[_Line]:
    rates = report.rates
    stages = ", ".join(f"{number} {stage.value}" for stage, number in report.stages.items()) or "none"
    return [
        (
            "",
            f"requests {amount(rates.requests_per_s)}/s   failures {amount(rates.failures_per_s)}/s   "
            f"tokens {amount(rates.generated_tokens_per_s)}/s   prompt tokens {amount(rates.prompt_tokens_per_s)}/s",
        ),
        ("", f"under way: {stages}"),
    ]


def _latencies(report: StatusReport) -> list[_Line]:
    found = report.latencies
    rows = [("", "p50", "p95", "p99")]
    for name, one in (("time to first token", found.ttft), ("between tokens", found.itl), ("whole request", found.e2e)):
        rows.append((name, *_three(one)))
    return _table(rows, "lrrr")


def _three(found: Percentiles) -> tuple[str, str, str]:
    return duration(found.p50), duration(found.p95), duration(found.p99)


def _nodes(report: StatusReport, lines_left: int | None) -> list[_Line]:
    """Returns ``lines_left`` lines at most, or one node's if the height is less."""
    if not report.nodes:
        return [(_YELLOW, "no node is registered")]
    nodes, left_out = report.nodes, report.nodes_left_out
    if lines_left is not None and 1 + len(nodes) + bool(left_out) > lines_left:
        nodes = nodes[: max(1, lines_left - 2)]
        left_out += len(report.nodes) - len(nodes)
    head = ("NODE", "ROLE", "STATE", "RUNNING", "WAITING", "KV CACHE", "TOK/S", "PROMPT/S", "STEP", "LINKS", "VERSION")
    lines = _table([head, *map(_node, nodes)], "lllrrlrrrll")
    if left_out:
        lines.append((_QUIET, f"{left_out} more"))
    return lines


def _node(node: NodeStatus) -> tuple[str, ...]:
    links = ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in node.links.items())
    return (
        printable_line(node.name),
        printable_line(node.role),
        printable_line(node.state),
        f"{node.running}/{node.max_running}",
        str(node.waiting),
        _bar(node.kv_used),
        amount(node.generated_tokens_per_s),
        amount(node.prompt_tokens_per_s),
        duration(node.step_s or None),
        printable_line(links) or "–",
        printable_line(node.version) or f"protocol {node.protocol}",
    )


def _bar(share: float | None) -> str:
    if share is None:
        return "–"
    filled = round(min(share, 1.0) * BAR_CHARS)
    return f"{'█' * filled}{'░' * (BAR_CHARS - filled)} {share:4.0%}"


def _requests(report: StatusReport, lines_left: int) -> list[_Line]:
    if not report.under_way or lines_left < 1:
        return []
    rows = [("REQUEST", "STAGE", "NODES", "SINCE")]
    rows += [_request(one, report.now_s) for one in report.under_way[:lines_left]]
    lines = [("", ""), *_table(rows, "lllr")]
    hidden = sum(report.stages.values()) - len(rows) + 1
    return [*lines, (_QUIET, f"{hidden} more")] if hidden > 0 else lines


def _request(one: SeenRequest, now_s: float) -> tuple[str, str, str, str]:
    nodes = " → ".join(printable_line(name) for name in (one.prefill, one.decode) if name)
    return printable_line(one.id)[:36], one.stage.value, nodes or "–", duration(now_s - one.arrived_s)


def _incidents(report: StatusReport, lines_left: int) -> list[_Line]:
    if not report.incidents or lines_left < 1:
        return []
    return [
        ("", ""),
        (_QUIET, "WHAT HAPPENED"),
        *(_incident(one, report) for one in report.incidents[: -lines_left - 1 : -1]),
    ]


def _incident(one: Incident, report: StatusReport) -> _Line:
    at = time.strftime("%H:%M:%S", time.localtime(report.unix_s - report.now_s + one.at_s))
    times = f" × {one.count}" if one.count > 1 else ""
    request = f" · {printable_line(one.request)}" if one.request else ""
    style = _RED if one.kind in _GRAVE else _YELLOW if one.kind in _NOTED else ""
    kind = one.kind.value.replace("_", " ")
    return style, f"{at}  {kind:14}  {printable_line(one.node)} {printable_line(one.text)}{times}{request}"


def _table(rows: Sequence[Sequence[str]], sides: str) -> list[_Line]:
    """Returns the rows in columns; the first one is their head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Iterable[str]) -> str:
        cells = zip(row, widths, sides, strict=True)
        return "  ".join(cell.rjust(width) if side == "r" else cell.ljust(width) for cell, width, side in cells)

    head, *rest = rows
    return [(_QUIET, line(head)), *(("", line(row)) for row in rest)]


def _cut(style: str, text: str, screen: ScreenSize) -> str:
    """Returns a line that fits."""
    width = max(screen.width, MIN_WIDTH)
    text = (text if len(text) <= width else f"{text[: width - 1]}…").rstrip()
    return f"\x1b[{style}m{text}\x1b[{_END}m" if style and text and screen.colour else text


def amount(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    for unit, size in (("min", 60), ("h", 3600)):
        if seconds < size * (120 if unit == "min" else 48):
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
