"""What a kubelet concludes from a container's probes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lab.deploy_containers.stand_in.manifests import Container, Probe


class ProbeKind(Enum):
    STARTUP = "startup"
    LIVENESS = "liveness"
    READINESS = "readiness"


@dataclass
class _Streak:
    """How often in a row a probe had the same answer."""

    good: bool = False
    length: int = 0

    def add(self, good: bool) -> int:
        self.length = self.length + 1 if good == self.good else 1
        self.good = good
        return self.length


@dataclass
class Health:
    """The state of one run of a container. It begins anew with each run."""

    container: Container
    started: bool = field(init=False)
    ready: bool = field(init=False)
    must_restart: bool = False
    """A startup or liveness probe has failed for good: the kubelet kills the container and runs it again."""
    _streaks: dict[ProbeKind, _Streak] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = self.container.startup_probe is None
        self.ready = self.started and self.container.readiness_probe is None

    def probe(self, kind: ProbeKind) -> Probe | None:
        return {
            ProbeKind.STARTUP: self.container.startup_probe,
            ProbeKind.LIVENESS: self.container.liveness_probe,
            ProbeKind.READINESS: self.container.readiness_probe,
        }[kind]

    def asks(self, kind: ProbeKind) -> bool:
        """Returns whether a probe is asked now: the startup probe until it succeeds, the others from then on."""
        return self.probe(kind) is not None and self.started != (kind is ProbeKind.STARTUP)

    def answered(self, kind: ProbeKind, good: bool) -> None:
        """Takes one answer of a probe."""
        probe = self.probe(kind)
        assert probe is not None and self.asks(kind), kind
        length = self._streaks.setdefault(kind, _Streak()).add(good)
        enough = length >= (probe.success_threshold if good else probe.failure_threshold)
        if not enough:
            return
        match kind:
            case ProbeKind.READINESS:
                self.ready = good
            case ProbeKind.STARTUP if good:
                self.started = True
                self.ready = self.container.readiness_probe is None
            case _ if not good:
                self.must_restart = True


RESTART_S = (0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)


def restart_pause_s(restarts: int) -> float:
    """Returns how long a kubelet waits before the restart after so many: at once first, and then ever longer."""
    return RESTART_S[min(restarts, len(RESTART_S) - 1)]
