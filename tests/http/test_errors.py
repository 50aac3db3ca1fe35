"""Tests the one form of all errors, byte by byte."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest, RequestError, TooManyRequests, Unavailable
from pdserve.http.errors import error_body


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (
            InvalidRequest("'n' is ü", param="n", code="bad"),
            '{"error":{"message":"\'n\' is ü","type":"invalid_request_error","param":"n","code":"bad"}}',
        ),
        (
            TooManyRequests("slow down", retry_after_s=1),
            '{"error":{"message":"slow down","type":"rate_limit_error","param":null,"code":null}}',
        ),
        (
            Unavailable("full", code="queue_full"),
            '{"error":{"message":"full","type":"service_unavailable","param":null,"code":"queue_full"}}',
        ),
    ],
)
def test_all_four_fields_are_there_in_this_order(error: RequestError, body: str) -> None:
    assert error_body(error) == body.encode()


@given(st.text())
def test_any_message_is_json(message: str) -> None:
    assert msgspec.json.decode(error_body(InvalidRequest(message)))["error"]["message"] == message
