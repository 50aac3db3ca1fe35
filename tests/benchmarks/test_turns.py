"""``benchmarks turns`` as a person runs it: what a prefill node computes of a later turn depends on KV return."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.bench.report import read_report
from tests.benchmarks.studies import run_study

# tests/cluster/test_kv_return.py shows in `make test` that a later turn finds the blocks of the answer before it.
pytestmark = [pytest.mark.integration, pytest.mark.nightly]

HYBRID_LAYERS = 4
SMALL = ("--conversations", "1", "--turns", "2", "--first-tokens", "48", "--new-tokens", "16", "--output-tokens", "65")


@pytest.mark.parametrize("layers", [0, HYBRID_LAYERS])
def test_a_later_turn_computes_only_what_is_new(tiny_model: Path, tmp_path: Path, layers: int) -> None:
    flags = ("--model", str(tiny_model), *SMALL, "--prompt-vocab", "400", "--kv-cache-mib", "64")
    run_study("turns", *flags, "--hybrid-layers", str(layers), "--json", "turns.json", folder=tmp_path, timeout_s=240)
    report = read_report(tmp_path / "turns.json")
    computed = {(row.at["KV return"], row.at["turn"]): row.figure("computed").value for row in report.rows_of("turns")}
    # The answer's 65 tokens end one token behind a block, and the last token is in no cache.
    assert computed == {("on", 1): 48, ("on", 2): 17, ("off", 1): 48, ("off", 2): 81}
    assert len(report.rows_of("with KV return against without")) == 2
