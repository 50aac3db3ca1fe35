"""Times the choice of nodes alone, in this process: ``python -m lab.scale.routing --json FILE``.

CPU time of a choice with the five heartbeats that come between two requests, by the number of nodes and the policy.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from lab.scale.figures import ChoiceRuns, ChoiceTimes, write
from lab.scale.mock_nodes import HEARTBEAT_S, MODEL, describe
from pdserve.bench.report import this_machine
from pdserve.config import RegistryConfig, RoutingPolicy
from pdserve.wire.discovery import NodeHeartbeat, NodeLoad, Register
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.routing.router import RouteQuery, Router

SIZES = (10, 100, 1000, 4000)
REQUESTS = 400
HEARTBEATS = 5
"""Heartbeats for each request: 1,000 nodes and 200 requests a second."""
PROMPT_BYTES = 2000
ROUNDS = 5


def choice_us(nodes: int, policy: RoutingPolicy) -> float:
    """Returns the microseconds of CPU time for a request and the heartbeats before it: the least of some rounds."""
    attempts, chance = Attempts(), random.Random(nodes)
    registry = Registry(HEARTBEAT_S, RegistryConfig().missed_heartbeats, watcher=attempts)
    router = Router(policy, attempts)
    infos = [describe(number, nodes, "http://127.0.0.1:1") for number in range(nodes)]
    for info in infos:
        registry.handle(Register(info), 0.0)
    prompts = [chance.randbytes(PROMPT_BYTES) for _ in range(REQUESTS)]
    beats = [
        NodeHeartbeat(chance.choice(infos).boot_id, NodeLoad(running=chance.randrange(64)))
        for _ in range(REQUESTS * HEARTBEATS)
    ]
    rounds = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for number, prompt in enumerate(prompts):
            for beat in beats[number * HEARTBEATS : (number + 1) * HEARTBEATS]:
                registry.handle(beat, 0.0)
                registry.next_expiry()
            route = router.choose(registry.serving(), RouteQuery(MODEL, prompt))
            attempts.begin((route.decode, 1), *[(node, 1) for node in route.prefill[:1]]).end_everywhere()
        rounds.append(time.thread_time() - began)
    return min(rounds) / REQUESTS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.scale.routing", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    asked = parser.parse_args()
    print("nodes", *[policy.value for policy in RoutingPolicy], sep="\t")
    found = []
    for nodes in SIZES:
        times = {policy.value: choice_us(nodes, policy) for policy in RoutingPolicy}
        print(nodes, *[f"{us:.0f}" for us in times.values()], sep="\t", flush=True)
        found.append(ChoiceTimes(nodes, times))
    if asked.json is not None:
        write(asked.json, ChoiceRuns(this_machine(), tuple(found)))


if __name__ == "__main__":
    main()
