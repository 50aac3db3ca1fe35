"""Tests what the picture of a request says of an answer that went on at another node."""

from __future__ import annotations

import pytest

from pdserve.cli.watch.trace import picture
from pdserve.wire.timeline import Moment, MomentKind, ProcessKind, Timeline, TimelinePart


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        (MomentKind.FIRST_TOKEN, "54 + 249 tokens"),
        (MomentKind.RESUMED, "54 + at least 249 tokens"),
        (MomentKind.MOVED, "54 + at least 249 tokens"),
    ],
)
def test_the_tokens_of_an_answer_that_went_on_elsewhere_are_not_all_known(kind: MomentKind, tokens: str) -> None:
    proxy = TimelinePart(
        request_id="r", process=ProcessKind.PROXY, start_s=0, end_s=6, moments=(Moment(kind=kind, at_s=2),)
    )
    node = TimelinePart(
        request_id="r", process=ProcessKind.API, start_s=2, end_s=6, node="d1", prompt_tokens=54, output_tokens=249
    )
    timeline = Timeline(request_id="r", began=0.0, duration_s=6.0, finished=True, parts=(proxy, node))
    assert f", {tokens}, " in next(picture(timeline, 80))
