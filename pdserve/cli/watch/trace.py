"""``pdserve trace`` shows what happened to a request, and when; or to the slowest requests, or to those that failed."""

from __future__ import annotations

import http.client
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pdserve.cli.node_commands import KEY_ADVICE, CommandFailed, error_message, leading_flags
from pdserve.cli.watch.timeline_picture import ASCII, UNICODE, picture
from pdserve.config import AdmissionConfig, AskedRequestConfig, RequestTraceConfig, Switch
from pdserve.doctor.cluster import direct_opener
from pdserve.errors import ConfigError
from pdserve.http.tls import Trust, read_authorities
from pdserve.printable import printable
from pdserve.settings import load
from pdserve.wire.status import IncidentKind, SeenRequest
from pdserve.wire.timeline import Timeline
from pdserve_proxy.credentials import read_api_keys
from pdserve_proxy.relay.outcomes import has_failed
from pdserve_proxy.status.report import StatusAnswer, StatusReport

_DESCRIPTION = (
    "pdserve trace REQUEST_ID draws what each process did for a request, on one axis of time. REQUEST_ID is what the "
    "answer's header x-request-id says, and the logs. pdserve trace --slowest N and pdserve trace --failed look for "
    "requests themselves. Exit status 1 if nobody remembers a request."
)
_MAX_ANSWER_BYTES = 64 * 2**20
_HEAD = ("request", "came at", "TTFT", "total", "outcome", "answer at", "prompt at")


def trace_flags(argv: Sequence[str]) -> list[str]:
    """Returns ``argv`` with a leading request id replaced by the flag that it stands for."""
    return leading_flags(argv, ("--request",))


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError, and CommandFailed if the proxy does not tell what is asked."""
    config = load(RequestTraceConfig, trace_flags(argv), environ, prog="pdserve trace", description=_DESCRIPTION)
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
    listed = [_recent(one, report, why.get(one.id, "")) for one in report.ended if has_failed(one.status, one.outcome)]
    known = {one.id for one in listed}
    others = [
        RecentRequest(one.request, _unix_s(one.at_s, report), decode=one.node, why=one.text)
        for one in incidents
        if one.request not in known
    ]
    return sorted([*listed, *others], key=lambda one: one.came, reverse=True)[:count]


def _recent(one: SeenRequest, report: StatusReport, why: str = "") -> RecentRequest:
    first_s = one.prompt_done_s if one.first_token else None
    outcome = f"{one.outcome} {one.status}" if one.status else one.outcome
    return RecentRequest(
        one.id,
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
