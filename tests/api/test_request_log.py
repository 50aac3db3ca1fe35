"""Tests the log line of a request."""

from __future__ import annotations

import logging

import pytest

from pdserve.api.generation.request_log import ChoiceOutcome, RequestRecord, log_request
from pdserve.wire.engine import PrefillReason, PrefillSource, RequestReport


def line_of(record: RequestRecord, now: float, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    with caplog.at_level(logging.INFO, logger="pdserve.request"):
        log_request(record, now)
    return dict(field.split("=", 1) for field in caplog.messages[-1].split())


def test_times_and_rates(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord("r", "decode-0", 10.0, 100, 21, 10.5, 11.5, [ChoiceOutcome.STOP])
    report = RequestReport(
        prefill_source=PrefillSource.REMOTE,
        prefill_node="prefill-0",
        placed=PrefillReason.TARGET,
        cached_tokens=16,
        queue_s=0.25,
        prefill_s=0.2,
        transfer_s=0.01,
    )
    record.reports.append(report)
    assert line_of(record, 12.0, caplog) == {
        "request_id": "r",
        "prefill": "prefill-0",
        "source": "remote",
        "reason": "target",
        "decode": "decode-0",
        "prompt": "100",
        "cached": "16",
        "output": "21",
        "queue_ms": "250.0",
        "prefill_ms": "200.0",
        "ttft_ms": "500.0",
        "tpot_ms": "50.0",
        "total_ms": "2000.0",
        "prompt_tok_s": "200.0",
        "output_tok_s": "20.0",
        "total_tok_s": "60.5",
        "finish": "stop",
    }


def test_what_is_not_known_is_a_dash(caplog: pytest.LogCaptureFixture) -> None:
    line = line_of(RequestRecord("r", "decode-0", 10.0, 100, outcomes=[ChoiceOutcome.ABORT]), 10.0, caplog)
    assert {
        line[name]
        for name in (
            "reason",
            "queue_ms",
            "prefill_ms",
            "ttft_ms",
            "tpot_ms",
            "prompt_tok_s",
            "output_tok_s",
            "total_tok_s",
        )
    } == {"-"}
    assert (line["output"], line["finish"]) == ("0", "abort")
