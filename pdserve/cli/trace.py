"""``pdserve trace`` shows what happened to a request, and when."""

from __future__ import annotations

import http.client
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence

import msgspec

from pdserve.cli.node_command import CommandFailed, leading_flags
from pdserve.cli.timeline_picture import ASCII, UNICODE, picture
from pdserve.config import AdmissionConfig, AskedRequestConfig, RequestTraceConfig, Switch
from pdserve.doctor.cluster import direct_opener
from pdserve.errors import ConfigError
from pdserve.http.tls import Trust, read_authorities
from pdserve.settings import load
from pdserve.wire.timeline import Timeline
from pdserve_proxy.credentials import read_api_keys

_DESCRIPTION = (
    "pdserve trace REQUEST_ID draws what each process did for a request, on one axis of time. REQUEST_ID is what the "
    "answer's header x-request-id says, and the logs. Exit status 1 if nobody remembers the request."
)
_MAX_ANSWER_BYTES = 64 * 2**20


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError, and CommandFailed if there is no timeline."""
    flags = leading_flags(argv, ("--request",))
    config = load(RequestTraceConfig, flags, environ, prog="pdserve trace", description=_DESCRIPTION)
    if not config.asked.request:
        raise ConfigError("which request? Give the x-request-id of its answer")
    body = _ask(config.asked, Trust(read_authorities(config.trust.authorities)))
    if config.asked.json is Switch.ON:
        print(body.decode())
        return 0
    try:
        timeline = msgspec.json.decode(body, type=Timeline)
    except msgspec.MsgspecError as exc:
        raise CommandFailed(f"{config.asked.proxy_url} gave no timeline: {exc}") from exc
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    for line in picture(timeline, shutil.get_terminal_size((120, 40)).columns, UNICODE if unicode else ASCII):
        print(line)
    return 0


def _ask(asked: AskedRequestConfig, trust: Trust) -> bytes:
    """Returns the timeline as the proxy's JSON. Raises CommandFailed."""
    name = urllib.parse.quote(asked.request, safe="")
    url = f"{asked.proxy_url.rstrip('/')}/requests/{name}/timeline"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--proxy-url: {asked.proxy_url!r} was given; it takes a URL like http://127.0.0.1:8000")
    keys = read_api_keys(AdmissionConfig(api_keys=asked.api_keys, api_key_file=asked.api_key_file))
    headers = {"authorization": f"Bearer {keys[0].key}"} if keys else {}
    request = urllib.request.Request(url, None, headers)  # noqa: S310  # it begins with http
    try:
        with direct_opener(trust).open(request, timeout=asked.timeout_s) as response:
            body: bytes = response.read(_MAX_ANSWER_BYTES)
            return body
    except urllib.error.HTTPError as exc:
        with exc:
            raise CommandFailed(_message(exc)) from exc
    except (OSError, http.client.HTTPException) as exc:
        raise CommandFailed(f"no answer from {asked.proxy_url}: {exc}") from exc


def _message(error: urllib.error.HTTPError) -> str:
    body = error.read(64 * 1024)
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.MsgspecError:
        return f"the proxy answers with status {error.code}"
