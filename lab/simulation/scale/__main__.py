"""Asks a cluster of any size in virtual time: ``python -m lab.simulation.scale --nodes 1000 --streams 100000``.

It prints one line of JSON for each policy. The same seed gives the same figures, but for ``costs`` and ``cpu_s``, which
are real.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import fields
from pathlib import Path

import msgspec

from lab.simulation.scale.cluster import Plan, Scale
from lab.simulation.scale.figures import Run, add, rounded
from lab.simulation.scale.measured import measured_profile
from pdserve.config import RoutingPolicy
from pdserve.plan.profile import Profile, read_profile


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.simulation.scale", description=__doc__)
    parser.add_argument(
        "--profile", type=Path, help="a file that `pdserve plan profile` wrote [made of the reports in docs/benchmarks]"
    )
    parser.add_argument("--policy", nargs="+", type=RoutingPolicy, default=list(RoutingPolicy))
    parser.add_argument("--max-num-seqs", type=int, default=256, help="places in a decode node's batch")
    parser.add_argument("--lose-rack", type=float, default=0.0, metavar="SHARE", help="of the nodes, dies at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add each run to this file, or replace it there")
    for field in fields(Plan):
        if field.name not in ("policy", "lose"):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    asked = vars(parser.parse_args())
    places, file = asked.pop("max_num_seqs"), asked.pop("profile")
    profile = measured_profile(places) if file is None else with_places(read_profile(file), places)
    policies, lose, path = asked.pop("policy"), asked.pop("lose_rack"), asked.pop("json")
    gc.disable()  # nothing here refers to itself, and 100,000 streams take long to look through
    for policy in policies:
        began = time.process_time()
        plan = Plan(**asked, policy=policy, lose=lose)
        run = Run(plan, Scale(plan, profile).run(), time.process_time() - began)
        print(msgspec.json.encode(rounded(msgspec.to_builtins(run))).decode(), flush=True)
        if path is not None:
            add(path, run)


def with_places(profile: Profile, max_num_seqs: int) -> Profile:
    """Returns the profile of a node with so many places in its batch: batches were measured up to fewer."""
    return msgspec.structs.replace(profile, cache=msgspec.structs.replace(profile.cache, max_num_seqs=max_num_seqs))


if __name__ == "__main__":
    main()
