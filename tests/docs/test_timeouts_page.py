"""Tests that the page of timeouts has every setting that ends a wait, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.config import NodeConfig, ProxyConfig
from pdserve.settings.setting import settings_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "timeouts.md"
NO_WAITS = {
    "proxy-resolve-s": "an interval",
    "transfer-heartbeat-ms": "an interval",
    "roles-interval-ms": "an interval",
    "roles-rest-s": "a pause between changes",
    "store-ttl-s": "the age of a stored response",
    "suspect-s": "the age of a suspicion",
    "target-ttft-ms": "a target",
    "target-itl-ms": "a target",
}
"""Settings in seconds or milliseconds by which nobody gives up on anybody."""

ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]


def waits() -> dict[str, float]:
    """Returns the default, in seconds, of each setting of a node or a proxy that ends a wait."""
    found = {}
    for root in (NodeConfig, ProxyConfig):
        for setting in settings_of(root):
            unit = {"s": 1.0, "ms": 1000.0}.get(setting.flag.rpartition("-")[2])
            if unit is not None and setting.flag not in NO_WAITS:
                found[setting.flag] = float(setting.default) / unit
    return found


@pytest.mark.parametrize("flag", sorted(waits()))
def test_the_page_has_each_wait_with_its_default(flag: str) -> None:
    rows = [row for row in ROWS if f"`--{flag}`" in row]

    assert rows, f"{PAGE.name} does not say who gives up by --{flag}"
    shown = {float(number) for row in rows for number in re.findall(r"(\d+(?:\.\d+)?) s\b", row)}
    assert waits()[flag] in shown


def test_what_is_no_wait_is_a_setting() -> None:
    flags = {setting.flag for root in (NodeConfig, ProxyConfig) for setting in settings_of(root)}

    assert flags >= NO_WAITS.keys()
