"""Tests what the doctor says of KV return."""

from __future__ import annotations

import pytest

from pdserve.config import CacheConfig, KvReturn, Switch, TransferConfig
from pdserve.doctor.examination import check_kv_return
from pdserve.doctor.finding import Verdict


@pytest.mark.parametrize(
    ("kv_return", "prefix_cache", "verdict"),
    [
        (KvReturn.AUTO, Switch.ON, Verdict.OK),
        (KvReturn.ON, Switch.ON, Verdict.OK),
        (KvReturn.OFF, Switch.ON, Verdict.OK),
        (KvReturn.OFF, Switch.OFF, Verdict.OK),
        (KvReturn.AUTO, Switch.OFF, Verdict.WARNING),
        (KvReturn.ON, Switch.OFF, Verdict.PROBLEM),
    ],
)
def test_kv_return_needs_a_prefix_cache(kv_return: KvReturn, prefix_cache: Switch, verdict: Verdict) -> None:
    found = check_kv_return(TransferConfig(kv_return=kv_return), CacheConfig(prefix_cache=prefix_cache))
    assert found.verdict is verdict
    assert found.seen.startswith("on") == (verdict is Verdict.OK and kv_return is not KvReturn.OFF)
    assert bool(found.advice) == (verdict is not Verdict.OK)
