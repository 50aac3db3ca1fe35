"""Tests the local process that the doctor probes when the user names no peer."""

from __future__ import annotations

import os
import time

import pytest

from pdserve.config import TransferConfig
from pdserve.doctor.probe import StandIn, standing_in
from pdserve.errors import PeerLost, TransferError
from pdserve_kvtransfer.probe.examiner import Examiner
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport

pytestmark = pytest.mark.integration

SECRET = b"the secret of one probe, 32 byte"
WAIT_S = 10.0


def test_it_is_probed_and_ends() -> None:
    told = StandIn(SECRET, TransferConfig(), 64 * 1024)
    with standing_in(told, os.environ) as control, Examiner(control, SECRET, UcxTransport("")) as asker:
        found = asker.examine(WAIT_S)
        assert found is not None and found.block_bytes == 64 * 1024
        assert asker.probe(64 * 1024, 32, WAIT_S).received == 32
    begun = time.monotonic()
    with Examiner(control, SECRET, UcxTransport("")) as asker, pytest.raises(PeerLost):
        asker.examine(WAIT_S)
    assert time.monotonic() - begun < WAIT_S, "it noticed that nobody is there any more"


def test_one_that_does_not_come_up_is_an_error() -> None:
    told = StandIn(SECRET, TransferConfig(ucx_tls="nonsense"), 1024)
    with pytest.raises(TransferError, match="did not come up"), standing_in(told, os.environ):
        raise AssertionError("there is no address")
