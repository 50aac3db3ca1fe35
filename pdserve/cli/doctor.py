"""``pdserve doctor`` examines this machine and its peers, and prints what it found."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from pdserve.bench.report import check_folder, publish
from pdserve.config import DoctorConfig
from pdserve.doctor.finding import Finding, Verdict
from pdserve.errors import ConfigError
from pdserve.settings import cache_folder, load, resolve_secret, state_folder

if TYPE_CHECKING:
    from pdserve.doctor.examination import Examination
    from pdserve.wire.transfer import EngineSpec

_DESCRIPTION = (
    "Looks at this machine's software, UCX transports, RDMA ports, limits, cores and network, asks each named peer "
    "what it is, and measures the way to it. It says of each thing whether it is right and, if not, what to do. "
    "Exit status 1 if there is a problem. It changes nothing."
)
_WIDTH = 120
_GAP = "  "
_PLURAL = {Verdict.PROBLEM: "problems", Verdict.WARNING: "warnings"}


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError or ModelError for settings that cannot be used."""
    config = load(DoctorConfig, argv, environ, prog="pdserve doctor", description=_DESCRIPTION)
    check_folder("--json", config.report.json)
    from pdserve.doctor.examination import examine

    # A copy: ucxx puts variables of its own into the environment when it is imported.
    found = examine(config, dict(environ), _secret(config, environ), _model(config, environ))
    publish(render(found, _width()), to_json(found), config.report.json)
    return 0 if found.healthy else 1


def _secret(config: DoctorConfig, environ: Mapping[str, str]) -> bytes | str:
    """Returns the secret, or the reason why there is none: the rest of the examination does not need it."""
    from pdserve.doctor.network import host_of

    peers = [host_of(peer) for peer in (*config.diagnosis.peers, config.diagnosis.proxy_url) if peer]
    try:
        return resolve_secret(config.security, peers, state_folder(environ))
    except ConfigError as exc:
        return str(exc)


def _model(config: DoctorConfig, environ: Mapping[str, str]) -> EngineSpec | None:
    """Returns what a decode engine here would be; None if no model is named. Raises ModelError and ConfigError."""
    if not config.model.path:
        return None
    from pdserve.doctor.peers import local_spec
    from pdserve.hub.finding import find_model

    model = dataclasses.replace(config.model, path=str(find_model(config.model, environ).path))
    return local_spec(model, config.cache, config.cpu.kernels, cache_folder(environ))


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return _WIDTH


def render(examination: Examination, width: int) -> str:
    """Returns lines of at most ``width`` columns, as far as the words' lengths allow."""
    findings = examination.findings
    first = max(len(finding.verdict.value) for finding in findings)
    second = min(30, max(len(finding.check) for finding in findings))
    head = f"pdserve doctor {examination.version} on {examination.host}, {examination.examined} UTC"
    lines = [line for finding in findings for line in _lines(finding, first, second, width)]
    return "\n".join([head, "", *lines, "", _summary(findings)])


def _lines(finding: Finding, first: int, second: int, width: int) -> Iterator[str]:
    indent = " " * (first + second + 2 * len(_GAP))
    text_width = max(30, width - len(indent))
    check = f"{finding.verdict.value:{first}}{_GAP}{finding.check:{second}}{_GAP}"
    seen = textwrap.wrap(finding.seen, text_width, break_long_words=False) or [""]
    if len(finding.check) > second:
        yield check.rstrip()
        check = indent
    yield (check + seen[0]).rstrip()
    yield from (indent + line for line in seen[1:])
    yield from (
        indent + line
        for line in textwrap.wrap(
            finding.advice, text_width, initial_indent="→ ", subsequent_indent="  ", break_long_words=False
        )
    )


def _summary(findings: tuple[Finding, ...]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    bad = [f"{counts[verdict]} {name if counts[verdict] != 1 else name[:-1]}" for verdict, name in _PLURAL.items()]
    return f"{len(findings)} checks: {', '.join(bad)}"


def to_json(examination: Examination) -> bytes:
    """Returns the examination as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(examination), indent=1) + b"\n"
