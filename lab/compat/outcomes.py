"""The lines of JSON in which programs and the plugin for pytest say how each of their checks ended."""

from __future__ import annotations

import msgspec

from lab.compat.results import Outcome


class ReportedOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one test or check ended, in its own environment."""

    test: str
    outcome: Outcome
    message: str


_DECODER = msgspec.json.Decoder(ReportedOutcome)


def parse_outcomes(lines: bytes) -> tuple[ReportedOutcome, ...]:
    return tuple(_DECODER.decode_lines(lines))
