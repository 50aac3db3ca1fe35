"""Tests which ``traceparent`` headers are read. Any client may send one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.wire.timeline import TraceContext, read_traceparent
from tests.examples import examples

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f" 00-{TRACE}-{SPAN}-01 ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_a_header_is_read(header: str, sampled: bool) -> None:
    assert read_traceparent(header) == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n00",
    ],
)
def test_a_malformed_header_counts_as_absent(header: str | None) -> None:
    assert read_traceparent(header) is None


@settings(max_examples=examples(100))
@given(st.text(max_size=100))
def test_no_header_fails(header: str) -> None:
    read_traceparent(header)
