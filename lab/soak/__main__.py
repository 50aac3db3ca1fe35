"""Runs a soak and judges it: ``python -m lab.soak --minutes 60 --seed 1``. ``make soak`` does.

The exit status is 0 if nothing was wrong, lost or leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from lab.soak.plot import write_plot
from lab.soak.report import SoakReport, read, show, to_report, write
from lab.soak.run import SOAK_MODELS, Soak, SoakPlan, run_soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=SoakPlan.minutes, help="how long the load goes on")
    parser.add_argument("--seed", type=int, default=SoakPlan.seed, help="decides requests, clients and faults")
    parser.add_argument(
        "--model",
        choices=SOAK_MODELS,
        default=SoakPlan.model,
        help="what is served: a model of states, windows, or none",
    )
    parser.add_argument("--clients", type=int, default=SoakPlan.clients, help="so many ask at once")
    parser.add_argument(
        "--fault-every-s", type=float, default=SoakPlan.fault_pause_s, help="the mean pause before a fault"
    )
    parser.add_argument(
        "--rest-every-s", type=float, default=SoakPlan.rest_every_s, help="load and faults pause so often"
    )
    parser.add_argument("--json", type=Path, help="all figures are written to this file")
    parser.add_argument("--plot", type=Path, help="the plot is written to this file, as SVG")
    parser.add_argument("--plot-again", type=Path, help="only plots the figures in this file")
    parser.add_argument("--keep", type=Path, help="logs are kept in this folder, which must not exist")
    options = parser.parse_args()
    # A shell that starts a soak in the background makes it ignore Ctrl-C's signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Like Ctrl-C, with which asyncio cancels the run alone: what stops the cluster goes on.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if options.plot_again is not None:
        write_plot(read(options.plot_again), options.plot)
        return 0
    plan = SoakPlan(
        options.minutes,
        options.seed,
        options.clients,
        options.fault_every_s,
        options.rest_every_s,
        model=options.model,
    )
    soak = Soak(plan)
    try:
        _run(soak, options.keep)
    finally:
        # Also of a run that broke off.
        report = to_report(soak)
        if options.json is not None:
            write(report, options.json)
        _show(report)
    if options.plot is not None:
        write_plot(report, options.plot)
    return 0 if report.ok else 1


def _run(soak: Soak, keep: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as made:
        folder = Path(made)
        try:
            asyncio.run(run_soak(soak, folder))
        finally:
            if keep is not None:
                shutil.copytree(folder, keep, ignore=shutil.ignore_patterns("model", "tenants", "admins", "tmp"))


def _show(report: SoakReport) -> None:
    for row in report.faults:
        times = f"whole again after {row.recovery_p50_s:g} s in the median, {row.recovery_max_s:g} s at most"
        print(f"{row.part:8} {row.count:4} {row.fault:32} {times}")
    for finding in report.findings:
        print(f"{finding.outcome.value} at {finding.at_s:.1f} s: {finding.ask}, {finding.label}: {finding.what}")
    print(show(report.verdict))


if __name__ == "__main__":
    sys.exit(main())
