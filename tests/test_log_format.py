"""Tests the lines of a JSON log: what becomes a field, and that no text of a client can make one."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from pdserve.log_format import MAX_TEXT_CHARS, JsonFormatter, as_text, fields_of


class Named:
    """An object that names itself as requests and transfers do."""

    def __str__(self) -> str:
        return "request_id=chat-1 uuid=0a1b"


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("pdserve.x", logging.WARNING, "", 0, message, arguments, info)


def line(message: str, *arguments: object, error: BaseException | None = None) -> dict[str, Any]:
    text = JsonFormatter("engine", "decode-0").format(record(message, *arguments, error=error))
    assert "\n" not in text
    read: dict[str, Any] = json.loads(text)
    return read


def test_a_line_says_who_wrote_it() -> None:
    written = line("it runs")
    assert written.pop("time").endswith("Z")
    assert written == {
        "level": "WARNING",
        "process": "engine",
        "node": "decode-0",
        "logger": "pdserve.x",
        "message": "it runs",
    }


def test_the_names_of_a_template_become_fields_with_their_types() -> None:
    written = line(
        "request_id=%s status=%d share=%.2f first_ms=%s total_s=%s decode=%s queue_ms=%s",
        "r",
        200,
        0.5,
        "1.5",
        "2",
        "7",
        "-",
    )
    assert written["request_id"] == "r"
    assert written["fields"] == {
        "status": 200,
        "share": 0.5,
        "first_ms": 1.5,
        "total_s": 2.0,
        "decode": "7",
        "queue_ms": None,
    }
    assert written["message"].startswith("request_id=r status=200 share=0.50")


def test_what_a_request_calls_itself_becomes_fields() -> None:
    written = line("%s transfer=%s: %s", Named(), "t/1", "why")
    assert (written["request_id"], written["fields"]) == ("chat-1", {"uuid": "0a1b", "transfer": "t/1"})


@pytest.mark.parametrize(
    "forged", ["outcome=ok", "request_id=mine status=1", '","level":"DEBUG', "\n{}", "\ud800", "%s a=%s"]
)
def test_no_text_forges_a_field_or_a_line(forged: str) -> None:
    written = line("request_id=%s failed: %s", "r", forged)
    assert (written["request_id"], written.get("fields")) == ("r", None)
    assert written["level"] == "WARNING"


def test_an_exception_is_in_its_line() -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError as exc:
        written = line("it failed", error=exc)
    assert "ValueError: broken" in written["exception"]


def test_a_long_text_is_cut() -> None:
    written = line("failed: %s why=%s", "x" * 10**6, "y" * 10**6)
    assert len(written["message"]) < MAX_TEXT_CHARS + 10
    assert len(written["fields"]["why"]) < MAX_TEXT_CHARS + 10


def test_an_unknown_request_has_no_id() -> None:
    assert "request_id" not in line("request_id=%s dropped", "-")


@pytest.mark.parametrize(
    ("message", "arguments"),
    [("100%% of %d", (3,)), ("%(a)s", ({"a": 1},)), ("plain", ()), ("%*d a=%s", (5, 3, "x"))],
)
def test_odd_templates_do_not_fail(message: str, arguments: tuple[object, ...]) -> None:
    fields_of(logging.LogRecord("x", logging.INFO, "", 0, message, arguments, None))


def test_people_can_read_a_line_too() -> None:
    text = JsonFormatter("proxy").format(record("pdserve proxy listening url=%s", "http://127.0.0.1:1"))
    assert as_text(text).endswith("WARNING pdserve.x: pdserve proxy listening url=http://127.0.0.1:1")
    for other in ("plain", "{broken", "{}", '{"time": 1}'):
        assert as_text(other) == other


def test_this_process_logs_no_json() -> None:
    """The formatter is not installed by an import."""
    assert not any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
    assert sys.excepthook is sys.__excepthook__
