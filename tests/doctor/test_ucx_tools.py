"""Runs UCX's own benchmark and tests how the doctor reads it."""

from __future__ import annotations

import os

import pytest

from pdserve.doctor.ucx import UcxTools, read_tools, read_yardstick
from pdserve_kvtransfer.ucx.ucx_library import loaded_ucx

pytestmark = pytest.mark.integration


def tools() -> UcxTools:
    found = read_tools(loaded_ucx())
    assert found is not None
    return found


def test_two_processes_are_measured() -> None:
    found = read_yardstick(tools(), dict(os.environ), "tcp", 64 * 1024)
    assert found is not None
    assert found.bytes_per_s > 0 and found.latency_s > 0
    assert (found.tls, found.message_bytes) == ("tcp", 64 * 1024)


def test_transports_that_are_not_there_give_no_figure() -> None:
    assert read_yardstick(tools(), dict(os.environ), "nonsense", 64 * 1024) is None
