"""Tests which versions the doctor reports, and whether it can load UCX."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

from pdserve.doctor.finding import Verdict
from pdserve.doctor.machine import check_software, read_software


def test_what_is_installed_here_is_fine() -> None:
    facts = read_software({"UCX_TLS": "tcp", "HOME": "/root"})
    found = {finding.check: finding for finding in check_software(facts)}
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert f"pdserve {facts.packages['pdserve']}" in found["software"].seen
    assert found["UCX variables"].seen == "UCX_TLS=tcp"
    assert facts.ucx is not None and facts.ucx.version.count(".") == 2
    assert found["UCX library"].seen == str(facts.ucx)


@pytest.mark.parametrize("cuda", ["cu12", "cu13"])
def test_ucxx_may_be_for_cuda_12_or_13(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if "-cu" in package and cuda not in package:
            raise PackageNotFoundError(package)
        return "1.2.3"

    monkeypatch.setattr("pdserve.doctor.machine.version", version)
    packages = read_software({}).packages
    assert all(packages.values())
    assert f"ucxx-{cuda}" in packages and f"libucx-{cuda}" in packages


def test_what_is_missing_is_a_problem() -> None:
    facts = replace(read_software({}), packages={"pdserve": "1", "ucxx-cu13": ""}, ucx_error="no libucp.so.0")
    found = {finding.check: finding for finding in check_software(facts)}
    assert found["software"].verdict is found["UCX library"].verdict is Verdict.PROBLEM
    assert "missing: ucxx-cu13" in found["software"].seen
    assert "libucp" in found["UCX library"].seen
