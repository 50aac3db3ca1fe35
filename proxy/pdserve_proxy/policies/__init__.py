"""How nodes are chosen, one policy a module. They see what they are given and do no I/O."""

from __future__ import annotations

from pdserve.config import RoutingPolicy
from pdserve_proxy.policies.least_loaded import LeastLoaded
from pdserve_proxy.policies.prefix_affinity import PrefixAffinity
from pdserve_proxy.policies.round_robin import RoundRobin
from pdserve_proxy.policies.selector import LoadOf, Selector
from pdserve_proxy.policies.two_choices import TwoChoices

__all__ = ["LoadOf", "Selector", "make_selector"]

_SELECTORS: dict[RoutingPolicy, type[RoundRobin | LeastLoaded | TwoChoices | PrefixAffinity]] = {
    RoutingPolicy.ROUND_ROBIN: RoundRobin,
    RoutingPolicy.LEAST_LOADED: LeastLoaded,
    RoutingPolicy.TWO_CHOICES: TwoChoices,
    RoutingPolicy.PREFIX_AFFINITY: PrefixAffinity,
}


def make_selector(policy: RoutingPolicy) -> Selector:
    """A new one for each set of nodes that are chosen from."""
    return _SELECTORS[policy]()
