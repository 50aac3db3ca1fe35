"""Runs seeds: ``python -m lab.simulation --seed N [--until T]`` or ``--seeds FIRST COUNT``."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from lab.simulation.plan import plan_of
from lab.simulation.run import run_plan, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed and print what happens")
    parser.add_argument("--until", type=float, help="end the run at this virtual time, in seconds")
    parser.add_argument("--debug", action="store_true", help="print the product's debug lines too")
    parser.add_argument("--whole", action="store_true", help="do not shrink a seed that fails")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "COUNT"), help="run many seeds")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed, options.until, logging.DEBUG if options.debug else logging.INFO, options.whole)
    first, count = options.seeds or (0, 100)
    return _many(range(first, first + count))


def _one(seed: int, until_s: float | None, level: int, whole: bool) -> int:
    plan = plan_of(seed)
    result = run_plan(seed, plan, until_s=until_s, level=level)
    if result.violations and not whole and until_s is None:
        plan = shrunk(seed, plan)
        result = run_plan(seed, plan, level=level)
    print(plan)
    print("\n".join(result.lines))
    print(f"seed {seed}: {result.virtual_s:.0f} s of cluster time, {result.turns} turns, hash {result.digest[:16]}")
    for violation in result.violations:
        print(f"violated: {violation}")
    return bool(result.violations)


def _many(seeds: range) -> int:
    began, virtual_s, failed = time.process_time(), 0.0, []
    outcomes: dict[str, int] = {}
    for seed in seeds:
        result = run_plan(seed, plan_of(seed))
        virtual_s += result.virtual_s
        for outcome in result.outcomes:
            name = outcome.value if outcome is not None else "none"
            outcomes[name] = outcomes.get(name, 0) + 1
        if result.violations:
            failed.append(seed)
            print(f"seed {seed}: {'; '.join(result.violations)}", flush=True)
    used = time.process_time() - began
    print(
        f"{len(seeds)} seeds, {len(failed)} failed, {virtual_s:.0f} s of cluster time in {used:.1f} s of CPU time: "
        f"{virtual_s / used:.0f} a second; requests: {outcomes}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
