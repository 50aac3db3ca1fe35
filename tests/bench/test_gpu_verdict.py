"""Tests that the verdict reads the targets on a GPU correctly from a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.bench.report import Better, Figure, Report, Row, Unit, read_report, this_machine, to_json
from tests.gpu import verdict
from tests.gpu.compiled import NO_CHIP, compiled_row, launches_on, least_rows, programs_at_once
from tests.kernels.test_triton_compiler import SHARED_MEMORY


def report(attention: float, one: float, many: float, prefill: float, model: str = verdict.MODEL) -> Report:
    def step(batch: int, times: float, model: str = model) -> Row:
        figures = (
            Figure("step : least", times, Unit.RATIO, Better.LOWER),
            Figure("KV read : copy", attention, Unit.RATIO, Better.HIGHER),
        )
        return Row("decode step", {"model": model, "batch": batch, "context": 1024}, figures)

    rate = Figure("rate : matrix product", prefill, Unit.RATIO, Better.HIGHER)
    rows = [step(1, one), step(64, many)]
    rows += [Row("prefill step", {"model": model, "chunk": chunk}, (rate,)) for chunk in (1024, 8192)]
    others = [(name, 8192) for name in verdict.PACKED] + [(name, 4096) for name in verdict.WHOLE]
    for other, chunk in others if model == verdict.MODEL else ():
        rows += [step(batch, many * 1.07, other) for batch in (1, 16, 64)]
        rows.append(Row("prefill step", {"model": other, "chunk": chunk}, (rate,)))
    if model == verdict.MODEL:
        least = Figure("experts : least", many * 1.07, Unit.RATIO, Better.LOWER)
        rows += [Row("experts alone", {"model": verdict.EXPERTS, "batch": batch}, (least,)) for batch in (1, 16, 64)]
        rows.append(Row("experts alone", {"model": verdict.EXPERTS, "batch": 4096}, (rate,)))
    return Report("engine", this_machine("an H200"), {}, (), tuple(rows))


def transfer_report(share: float) -> Report:
    figures = (Figure("engine : ucx_perftest", share, Unit.RATIO, Better.HIGHER),)
    rows = tuple(Row("transfer", {"block": f"{kib} KiB", "checksums": "off"}, figures) for kib in (360, 2048))
    return Report("transfer", this_machine("an H200"), {}, (), rows)


def serving_report(p99_ms: float) -> Report:
    figures = (Figure("ITL p50", 6.5, Unit.MS, Better.LOWER), Figure("ITL p99", p99_ms, Unit.MS, Better.LOWER))
    rows = tuple(
        Row("closed loop", {"shape": "1024/128", "clients": clients, "system": system}, figures)
        for clients, system in ((16, "mixed"), (64, "mixed"), (64, "always"))
    )
    return Report("goodput", this_machine("an H200"), {}, (), rows)


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ((0.8, 1.3, 1.3, 0.5, 0.8, 52.0), [True, True, True, True, True, True]),
        ((0.79, 1.31, 1.0, 0.6, 0.79, 52.1), [False, False, True, True, False, False]),
        ((0.9, 1.0, 1.31, 0.49, 0.9, 40.0), [True, True, False, False, True, True]),
    ],
)
def test_each_target_is_judged(
    values: tuple[float, float, float, float, float, float],
    met: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine, transfer, serving = (tmp_path / f"{name}.json" for name in ("engine", "transfer", "serving"))
    serving.write_bytes(to_json(serving_report(values[5])))
    engine.write_bytes(to_json(report(*values[:4])))
    transfer.write_bytes(to_json(transfer_report(values[4])))
    log, out = tmp_path / "tests.log", tmp_path / "report.json"
    log.write_text("...\n======= 12 passed, 1 skipped in 3.45s =======\n")
    monkeypatch.setattr(
        "sys.argv", ["verdict", *map(str, (engine, transfer, serving)), "--out", str(out), "--tests", str(log)]
    )
    # Steps of other models, and experts, take 1.07 times as long here, which their targets allow.
    steps, prefill, experts = [met[2]] * 15, [met[3]] * 5, [met[2]] * 3
    met = [*met, *steps, *prefill, *experts, met[3]]
    assert verdict.main() == (0 if all(met) else 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("met") for line in lines] == met
    written = read_report(out)
    assert "tests: 12 passed, 1 skipped in 3.45s" in written.notes
    assert [row.at["verdict"] == "met" for row in written.rows_of(verdict.VERDICT)] == met
    given = report(*values[:4]), transfer_report(values[4]), serving_report(values[5])
    assert len(written.rows) == len(met) + sum(len(one.rows) for one in given)
    shown = verdict.part(written).splitlines()
    assert [line.endswith("| met |") for line in shown[4:]] == met


def test_what_was_not_measured_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdict.judged(report(1.0, 1.0, 1.0, 1.0, model="135M-shaped"))
    assert [one.met for one in found] == [False] * len(verdict.TARGETS)
    assert all("not measured" in str(one) for one in found)
    monkeypatch.setattr("sys.argv", ["verdict", str(tmp_path / "there is none")])
    assert verdict.main() == 1


@pytest.mark.parametrize(
    ("capability", "registers", "shared_kib", "warps", "programs"),
    [(90, 32, 0, 4, 16), (90, 32, 0, 1, 32), (90, 179, 96, 8, 1), (90, 64, 56, 4, 4), (86, 16, 0, 4, 12)],
    ids=["warps", "programs", "registers", "shared memory", "a smaller processor"],
)
def test_a_processor_runs_as_many_programs_as_its_scarcest_resource_allows(
    capability: int, registers: int, shared_kib: float, warps: int, programs: int
) -> None:
    assert programs_at_once(capability, registers, shared_kib, warps) == programs


@pytest.mark.nightly
def test_without_a_gpu_a_report_says_what_the_compiler_says() -> None:
    (launch,) = [one for one in launches_on(90) if one.kernel.__name__ == "_prefill_kernel"]
    row = compiled_row(launch, "prefill_kernel", 90)
    assert 0 < row.figure(verdict.REGISTERS).value <= 255
    assert 0 < row.figure(verdict.SHARED).value <= SHARED_MEMORY[90]
    assert row.figure("programs of a processor").value == 1
    made = Report("gpu", this_machine(), {}, (NO_CHIP,), (row, *least_rows()))
    shown = verdict.part(made)
    assert "no GPU" in shown and NO_CHIP in shown and "| `prefill_kernel` |" in shown
    # A chip with more of everything takes less time.
    bounds = {(row.at["chip"], row.at["step"]): row.figures[0].value for row in least_rows()}
    for step in {step for _, step in bounds}:
        assert bounds["B200", step] < bounds["H200", step] <= bounds["H100 SXM", step] < bounds["A100 80 GB", step]
