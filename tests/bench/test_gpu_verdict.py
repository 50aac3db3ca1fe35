"""Tests that the verdict reads the targets on a GPU correctly from a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.bench.report import Better, Figure, Report, Row, Unit, this_machine, to_json
from tests.gpu import verdict


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
    for packed in verdict.PACKED if model == verdict.MODEL else ():
        rows += [step(batch, many * 1.07, packed) for batch in (1, 16, 64)]
        rows.append(Row("prefill step", {"model": packed, "chunk": 8192}, (rate,)))
    if model == verdict.MODEL:
        least = Figure("experts : least", many * 1.07, Unit.RATIO, Better.LOWER)
        rows += [Row("experts alone", {"model": verdict.EXPERTS, "batch": batch}, (least,)) for batch in (1, 16, 64)]
        rows.append(Row("experts alone", {"model": verdict.EXPERTS, "batch": 4096}, (rate,)))
    return Report("engine", this_machine("an H200"), {}, (), tuple(rows))


def transfer_report(share: float) -> Report:
    figures = (Figure("engine : ucx_perftest", share, Unit.RATIO, Better.HIGHER),)
    rows = tuple(Row("transfer", {"block": f"{kib} KiB", "checksums": "off"}, figures) for kib in (360, 2048))
    return Report("transfer", this_machine("an H200"), {}, (), rows)


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ((0.8, 1.3, 1.3, 0.5, 0.8), [True, True, True, True, True]),
        ((0.79, 1.31, 1.0, 0.6, 0.79), [False, False, True, True, False]),
        ((0.9, 1.0, 1.31, 0.49, 0.9), [True, True, False, False, True]),
    ],
)
def test_each_target_is_judged(
    values: tuple[float, float, float, float, float],
    met: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine, transfer = tmp_path / "engine.json", tmp_path / "transfer.json"
    engine.write_bytes(to_json(report(*values[:4])))
    transfer.write_bytes(to_json(transfer_report(values[4])))
    monkeypatch.setattr("sys.argv", ["verdict", str(engine), str(transfer)])
    # Steps with packed weights and experts take 1.07 times as long here, which their targets allow.
    steps, prefill, experts = [met[2]] * 6, [met[3]] * 2, [met[2]] * 3
    met = [*met, *steps, *prefill, *experts, met[3]]
    assert verdict.main() == (0 if all(met) else 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("met") for line in lines] == met


def test_what_was_not_measured_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = verdict.judged(report(1.0, 1.0, 1.0, 1.0, model="135M-shaped"))
    assert [met for _, met in lines] == [False] * len(verdict.TARGETS)
    assert all("not measured" in line for line, _ in lines)
    monkeypatch.setattr("sys.argv", ["verdict", str(tmp_path / "there is none")])
    assert verdict.main() == 1
