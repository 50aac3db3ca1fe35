"""Finds the smallest cluster that keeps the wanted latencies under a load, and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdserve.errors import PlanError
from pdserve.plan.cluster import ClusterShape
from pdserve.plan.load import PlannedRequest
from pdserve.plan.prediction import Prediction
from pdserve.plan.profile import Profile

_FEW = 8
"""Every cluster of so many nodes and fewer is tried."""
_MANY = 100
"""Fewer requests may come to an end although their nodes are too few."""
_OVERLOADED = 1.5
"""Nodes with so many times the work that they can do fall behind, whatever chance brings."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The smallest cluster that does, if there is any, and what was found of those around it."""

    chosen: ClusterShape | None
    tried: tuple[Prediction, ...]
    """The choice, its neighbours and as many mixed nodes, the smaller first; all that were tried without a choice."""


class Sizing:
    """Asks for the prediction of one cluster after the other, and of none twice."""

    def __init__(
        self, predict: Callable[[ClusterShape], Prediction], most_nodes: int, nodes_per_machine: int, least: int = 1
    ) -> None:
        """Fewer than ``least`` nodes are not looked at."""
        self._predict, self._most, self._per_machine = predict, most_nodes, nodes_per_machine
        self._least = min(least, most_nodes)
        self._known: dict[ClusterShape, Prediction] = {}

    def find(self) -> Sized:
        """Returns the smallest cluster: of equal ones, that with the most goodput."""
        chosen = self._among_all() or self._among_large()
        if chosen is None:
            return Sized(None, tuple(self._known.values()))
        shown = {chosen, *(near for near in neighbours(chosen) if near.nodes <= self._most)}
        shown.add(self._mixed(chosen.nodes))
        tried = sorted(
            map(self.of, shown),
            key=lambda prediction: (prediction.shape.nodes, prediction.shape.mixed, prediction.shape.prefill),
        )
        return Sized(chosen, tuple(tried))

    def _among_all(self) -> ClusterShape | None:
        """Tries every cluster of few nodes."""
        for nodes in range(self._least, min(self._most, _FEW) + 1):
            apart = [self._apart(prefill, nodes - prefill) for prefill in range(1, nodes)]
            enough = [shape for shape in (self._mixed(nodes), *apart) if self.of(shape).meets]
            if enough:
                return max(enough, key=lambda shape: self.of(shape).goodput)
        return None

    def _among_large(self) -> ClusterShape | None:
        """Walks along the border between clusters that do and others. More nodes are never taken to be worse."""
        if self._most <= _FEW:
            return None
        best = self._smallest_mixed()
        prefill, decode = 1, (self._most if best is None else best.nodes) - 1
        while decode:
            shape = self._apart(prefill, decode)
            if self.of(shape).meets:
                if best is None or (shape.nodes, -self.of(shape).goodput) < (best.nodes, -self.of(best).goodput):
                    best = shape
                decode -= 1
            else:
                prefill += 1
            decode = min(decode, (self._most if best is None else best.nodes) - prefill)
        return best

    def of(self, shape: ClusterShape) -> Prediction:
        if shape not in self._known:
            self._known[shape] = self._predict(shape)
        return self._known[shape]

    def _smallest_mixed(self) -> ClusterShape | None:
        """Doubles the nodes until they do, and then halves the interval. More nodes are never taken to be worse."""
        enough = min(max(2 * _FEW, self._least), self._most)
        while not self.of(self._mixed(enough)).meets:
            if enough == self._most:
                return None
            enough = min(2 * enough, self._most)
        too_few = max(_FEW, self._least - 1, min(enough // 2, enough - 1))
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            if self.of(self._mixed(middle)).meets:
                enough = middle
            else:
                too_few = middle
        return self._mixed(enough)

    def _mixed(self, nodes: int) -> ClusterShape:
        return ClusterShape(mixed=nodes, nodes_per_machine=self._per_machine)

    def _apart(self, prefill: int, decode: int) -> ClusterShape:
        return ClusterShape(prefill, decode, nodes_per_machine=self._per_machine)


def least_nodes(profile: Profile, load: Sequence[PlannedRequest], nodes_per_machine: int) -> int:
    """Returns how many nodes cannot be enough, and one more: full batches and nothing else would take them too long."""
    parts, rows = profile.speed(nodes_per_machine).steps, profile.cache.max_num_seqs
    seconds = load[-1].at_s - load[0].at_s
    if len(load) < _MANY or not seconds:
        return 1
    row_s = parts.step_s(rows, 0, 0) / rows
    work_s = sum(request.prompt_tokens * parts.prompt_token + (request.output_tokens - 1) * row_s for request in load)
    return max(1, int(work_s / seconds / _OVERLOADED))


def neighbours(shape: ClusterShape) -> list[ClusterShape]:
    """Returns the clusters with one node more or less of a kind, and with one moved from one kind to the other."""
    moves = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1))
    if shape.mixed:
        return [replace(shape, mixed=shape.mixed + more) for more in (-1, 1) if shape.mixed + more]
    return [
        replace(shape, prefill=shape.prefill + prefill, decode=shape.decode + decode)
        for prefill, decode in moves
        if shape.prefill + prefill > 0 and shape.decode + decode > 0
    ]


def checked_sizing(sizing: Sizing, what: str) -> Sized:
    """Returns what ``sizing`` finds. Raises PlanError if no cluster does, with the best that was tried."""
    sized = sizing.find()
    if sized.chosen is None:
        best = max(sized.tried, key=lambda found: (found.goodput, -found.ttft.asked, -found.itl.asked))
        raise PlanError(
            f"no cluster that was tried keeps {what}: {best.shape} has a TTFT of {best.ttft.asked * 1e3:.0f} ms and an "
            f"ITL of {best.itl.asked * 1e3:.1f} ms there. Allow more with --max-nodes, or want less"
        )
    return sized
