"""Tests ``benchmarks lent-cores`` on a tiny model. Its speed does not matter here."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.lent_cores import benchmark
from benchmarks.lent_cores.benchmark import Neighbour, lent_core_rows
from benchmarks.settings import BenchLentCoresConfig, LentCoresBenchConfig
from pdserve.bench.engine.subject import Steps, open_subject
from pdserve.config import Device, Dtype, ModelConfig
from pdserve.errors import BenchError
from pdserve.settings import cache_folder
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def cores_of_threads() -> set[frozenset[int]]:
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            found.add(frozenset(os.sched_getaffinity(int(thread))))
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="another engine has no core")
def test_borrowed_cores_are_timed(tiny: Path) -> None:
    lent = LentCoresBenchConfig(context=5, chunks=(7, 33), seconds=0.0)
    config = BenchLentCoresConfig(lent, model=ModelConfig(served_model_name="tiny", dtype=Dtype.FP32))
    before = cores_of_threads()
    report = benchmark.run(config, tiny, cache_folder(os.environ))
    found = [(row.what, row.at.get("step")) for row in report.rows]
    steps = ["decode", "prefill of 7", "prefill of 33"]
    assert found == [*(("step with borrowed cores", step) for step in steps), ("owner's wake-up", None)]
    assert all(figure.value > 0 for row in report.rows for figure in row.figures)
    # No thread stays on a part of the cores.
    assert cores_of_threads() <= before


def test_what_cannot_borrow_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = Steps((1,), (40,), (33,))
    model = ModelConfig(dtype=Dtype.FP32, device=Device.CPU)
    with pytest.raises(BenchError, match="compiled CPU kernels"):
        lent_core_rows(open_subject("tiny", tiny, model, 16, steps, TorchKernels), steps, tmp_path, 0.0)
    subject = open_subject("tiny", tiny, model, 16, steps, lambda: CompiledKernels(cache_folder(os.environ)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(BenchError, match="two cores"):
        lent_core_rows(subject, steps, tmp_path, 0.0)


def test_a_neighbour_that_has_ended_ends_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    neighbour = Neighbour(tmp_path / "ledger", tmp_path, [0])
    try:
        with pytest.raises(BenchError, match="does not answer"):
            neighbour.wait()
        neighbour.popen.wait(60)
        with pytest.raises(BenchError, match="has ended"):
            neighbour.order("sleep")
    finally:
        neighbour.end()
