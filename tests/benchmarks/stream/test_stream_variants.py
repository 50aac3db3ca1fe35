"""Tests the names of variants, their settings, and which variants are compared."""

from __future__ import annotations

import pytest

from benchmarks.stream.variants import Part, comparisons, variant, variants
from pdserve.config import NodeConfig, Switch
from pdserve.errors import ConfigError
from pdserve.settings import load


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("off", set()),
        ("on", set(Part)),
        ("notify+fast-path", {Part.NOTIFY, Part.FAST_PATH}),
        ("on-interval", {Part.DISPATCH, Part.NOTIFY, Part.FAST_PATH}),
    ],
)
def test_names(name: str, parts: set[Part]) -> None:
    assert variant(name).parts == parts


@pytest.mark.parametrize("name", ["", "of", "on-", "dispatch,notify", "off-dispatch", "dispatch+"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--variants"):
        variant(name)


def test_the_same_variant_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="mean the same"):
        variants(["notify+fast-path", "fast-path+notify"])


def test_a_node_takes_its_settings() -> None:
    off, on = (load(NodeConfig, [], variant(name).environ, prog="node").stream for name in ("off", "on"))
    assert (off.batched_dispatch, off.notify_size, off.fast_path, off.interval) == (Switch.OFF, 0, Switch.OFF, 1)
    assert (on.batched_dispatch, on.notify_size, on.fast_path, on.interval) == (Switch.ON, 16, Switch.ON, 10)


def test_each_part_is_compared_with_all_others_off_and_all_others_on() -> None:
    found = {(one.parts, one.others): (one.without.name, one.having.name) for one in comparisons(variants([]))}
    assert found["dispatch", "off"] == ("off", "dispatch")
    assert found["dispatch", "on"] == ("on-dispatch", "on")
    assert found["notify+fast-path", "on"] == ("on-notify+fast-path", "on")
    assert found["interval", "on"] == ("on-interval", "on")
    assert found["all", "off"] == ("off", "on")
    assert all(len(names) == 2 for names in found.values())


def test_nothing_to_compare_with() -> None:
    assert comparisons(variants(["dispatch", "on-interval"])) == []
