"""Finds the smallest cluster that keeps the wanted latencies under a load, and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdserve.errors import PlanError
from pdserve.plan.cluster import ClusterShape
from pdserve.plan.prediction import Prediction
from pdserve.wire.discovery import Role


@dataclass(frozen=True, slots=True)
class Sized:
    """The smallest clusters of each kind that do, if there are any, and all that were tried around them."""

    chosen: ClusterShape | None
    tried: tuple[Prediction, ...]
    """The choices and their neighbours, the smaller first."""


class Sizing:
    """Asks for the prediction of one cluster after the other, and of none twice."""

    def __init__(self, predict: Callable[[ClusterShape], Prediction], most_nodes: int, nodes_per_machine: int) -> None:
        self._predict, self._most, self._per_machine = predict, most_nodes, nodes_per_machine
        self._known: dict[ClusterShape, Prediction] = {}

    def find(self) -> Sized:
        """Returns the smallest cluster: of equal ones, that with the most goodput."""
        if self._most == 1:
            return self._around([self._smallest_mixed()])
        mixed = self._smallest_mixed()
        apart = self._smallest_apart(self._most if mixed is None else min(self._most, 2 * mixed.mixed + 2))
        return self._around([mixed, apart])

    def _around(self, shapes: Sequence[ClusterShape | None]) -> Sized:
        found = [shape for shape in shapes if shape is not None]
        chosen = min(found, key=lambda shape: (shape.nodes, -self.of(shape).goodput), default=None)
        for shape in found:
            for near in neighbours(shape):
                if near.nodes <= self._most:
                    self.of(near)
        shown = {near for shape in found for near in (shape, *neighbours(shape))} if found else set(self._known)
        tried = sorted(
            (prediction for shape, prediction in self._known.items() if shape in shown),
            key=lambda prediction: (prediction.shape.nodes, prediction.shape.mixed, prediction.shape.prefill),
        )
        return Sized(chosen, tuple(tried))

    def of(self, shape: ClusterShape) -> Prediction:
        if shape not in self._known:
            self._known[shape] = self._predict(shape)
        return self._known[shape]

    def _smallest_mixed(self) -> ClusterShape | None:
        """Doubles the nodes until they do, and then halves the interval. More nodes are never taken to be worse."""
        enough = 1
        while not self.of(self._mixed(enough)).meets:
            if enough == self._most:
                return None
            enough = min(2 * enough, self._most)
        too_few = enough // 2
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            if self.of(self._mixed(middle)).meets:
                enough = middle
            else:
                too_few = middle
        return self._mixed(enough)

    def _smallest_apart(self, most: int) -> ClusterShape | None:
        """Adds nodes of the kind that is late until both are in time, and then takes away what is not needed."""
        shape = self._apart(1, 1)
        while not (prediction := self.of(shape)).meets:
            room = most - shape.nodes
            if room <= 0:
                return None
            prefill_is_busier = prediction.busy[Role.PREFILL] >= prediction.busy[Role.DECODE]
            decode = not prediction.keeps_itl or not prefill_is_busier
            prefill = not prediction.keeps_ttft and (prefill_is_busier or not decode)
            more_decode = min(room, _more(shape.decode)) if decode else 0
            more_prefill = min(room - more_decode, _more(shape.prefill)) if prefill else 0
            shape = self._apart(shape.prefill + more_prefill, shape.decode + more_decode)
        return self._trimmed(shape)

    def _trimmed(self, shape: ClusterShape) -> ClusterShape:
        while True:
            fewer = [
                less
                for less in (self._apart(shape.prefill - 1, shape.decode), self._apart(shape.prefill, shape.decode - 1))
                if less.prefill and less.decode and self.of(less).meets
            ]
            if not fewer:
                return shape
            shape = max(fewer, key=lambda less: self.of(less).goodput)

    def _mixed(self, nodes: int) -> ClusterShape:
        return ClusterShape(mixed=nodes, nodes_per_machine=self._per_machine)

    def _apart(self, prefill: int, decode: int) -> ClusterShape:
        return ClusterShape(prefill, decode, nodes_per_machine=self._per_machine)


def _more(nodes: int) -> int:
    return max(1, nodes // 4)


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
        best = max(sized.tried, key=lambda prediction: prediction.goodput)
        raise PlanError(
            f"no cluster that was tried keeps {what}: {best.shape} has a TTFT of {best.ttft.asked * 1e3:.0f} ms and an "
            f"ITL of {best.itl.asked * 1e3:.1f} ms there. Allow more with --max-nodes, or want less"
        )
    return sized
