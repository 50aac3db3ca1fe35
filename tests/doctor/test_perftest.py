"""UCX's own yardstick, run for real and read."""

from __future__ import annotations

import os

from pdserve.doctor.perftest import Line, parse_final, read_yardstick
from pdserve.doctor.ucx_tools import UcxTools, read_tools

OUTPUT = """\
+--------------+--------------+------------------------------+---------------------+-----------------------+
|     Test     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
[thread 0]              1000      5.1     5.2     5.2    11000.00   11000.00      170000      170000
Final:                  2000      5.658     5.733     5.740    10901.77   10905.50      174428      174428
"""


def tools() -> UcxTools:
    found = read_tools()
    assert found is not None
    return found


def test_the_last_line_is_read() -> None:
    assert parse_final(OUTPUT) == Line(5.733, 10905.50)
    assert parse_final("") is None
    assert parse_final("Final: failed") is None


def test_two_processes_are_measured() -> None:
    found = read_yardstick(tools(), dict(os.environ), "tcp", 64 * 1024)
    assert found is not None
    assert found.bytes_per_s > 0 and found.latency_s > 0
    assert (found.tls, found.message_bytes) == ("tcp", 64 * 1024)


def test_transports_that_are_not_there_give_no_figure() -> None:
    assert read_yardstick(tools(), dict(os.environ), "nonsense", 64 * 1024) is None
