"""Tests which versions the doctor reports, and whether it can load UCX."""

from __future__ import annotations

from dataclasses import replace

from pdserve.doctor.finding import Verdict
from pdserve.doctor.software import check_software, read_software


def test_what_is_installed_here_is_fine() -> None:
    facts = read_software({"UCX_TLS": "tcp", "HOME": "/root"})
    found = {finding.check: finding for finding in check_software(facts)}
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert f"pdserve {facts.packages['pdserve']}" in found["software"].seen
    assert found["UCX variables"].seen == "UCX_TLS=tcp"
    assert facts.ucx is not None and facts.ucx.version.count(".") == 2
    assert found["UCX library"].seen == str(facts.ucx)


def test_what_is_missing_is_a_problem() -> None:
    facts = replace(read_software({}), packages={"pdserve": "1", "ucxx-cu12": ""}, ucx_error="no libucp.so.0")
    found = {finding.check: finding for finding in check_software(facts)}
    assert found["software"].verdict is found["UCX library"].verdict is Verdict.PROBLEM
    assert "missing: ucxx-cu12" in found["software"].seen
    assert "libucp" in found["UCX library"].seen
