"""``pdserve trace`` shows what happened to a request, and when; or to the slowest requests, or to those that failed."""

from __future__ import annotations

import http.client
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence

import msgspec

from pdserve.cli.node_commands import KEY_ADVICE, CommandFailed, leading_flags
from pdserve.cli.watch.recent_requests import failed, slowest, table
from pdserve.cli.watch.timeline_picture import ASCII, UNICODE, picture
from pdserve.config import AdmissionConfig, AskedRequestConfig, RequestTraceConfig, Switch
from pdserve.doctor.cluster import direct_opener
from pdserve.errors import ConfigError
from pdserve.http.tls import Trust, read_authorities
from pdserve.printable import printable
from pdserve.settings import load
from pdserve.wire.timeline import Timeline
from pdserve_proxy.credentials import read_api_keys
from pdserve_proxy.status.report import StatusAnswer

_DESCRIPTION = (
    "pdserve trace REQUEST_ID draws what each process did for a request, on one axis of time. REQUEST_ID is what the "
    "answer's header x-request-id says, and the logs. pdserve trace --slowest N and pdserve trace --failed look for "
    "requests themselves. Exit status 1 if nobody remembers a request."
)
_MAX_ANSWER_BYTES = 64 * 2**20


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


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
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message + advice
    except msgspec.MsgspecError:
        return f"the proxy answers with status {error.code}{advice}"
