"""One pod's life: its container runs, is asked by probes, runs again when it has ended, and stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import aiohttp

from lab.deploy_containers.stand_in.container_arguments import Identity, Secrets, container_arguments
from lab.deploy_containers.stand_in.health import Health, ProbeKind, restart_pause_s
from lab.deploy_containers.stand_in.manifests import ManifestError, Probe, Template, Volume
from lab.deploy_containers.stand_in.packet_rules import Endpoint
from lab.deploy_containers.stand_in.podman import Podman, PodmanError, watched
from lab.deploy_containers.stand_in.services import Backend

_LEAST_GRACE_S = 2.0
"""After a long preStop, SIGTERM has this long to work."""


class Moment(Enum):
    """What happens to a pod."""

    RUN = "run"
    STARTED = "started"
    READY = "ready"
    NOT_READY = "not ready"
    PROBE_FAILED = "probe failed"
    ENDED = "ended"
    TERMINATING = "terminating"
    TERM_SENT = "SIGTERM"
    KILL_SENT = "SIGKILL"
    GONE = "gone"


@dataclass
class Pod:
    """A pod that was made of a workload's template."""

    identity: Identity
    workload: str
    ordinal: int
    revision: str
    template: Template
    variables: Mapping[str, str]
    podman: Podman
    probes: aiohttp.ClientSession
    secrets: Secrets
    tell: Callable[[Pod, Moment], None]
    restarts: int = 0
    status: int | None = None
    """The last run's exit status."""
    moments: list[tuple[float, Moment]] = field(default_factory=list)
    _health: Health = field(init=False)
    _terminating: asyncio.Event = field(default_factory=asyncio.Event)
    _failed_probe: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._health = Health(self.template.container)
        self._running = False

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def ready(self) -> bool:
        return self._running and self._health.ready

    @property
    def terminating(self) -> bool:
        return self._terminating.is_set()

    @property
    def endpoint(self) -> Endpoint:
        ports = {port.name: port.container_port for port in self.template.container.ports}
        labels = self.template.metadata.labels
        return Endpoint(self.name, self.identity.address, self.identity.namespace, labels, ports)

    @property
    def backend(self) -> Backend:
        return Backend(self.endpoint, self.ready and not self.terminating)

    @property
    def container(self) -> str:
        """Returns the name of the container's present run."""
        return f"{self.name}-{os.getpid()}-{self.restarts}"

    def last(self, moment: Moment) -> float:
        """Returns when something happened last."""
        return next(at for at, each in reversed(self.moments) if each is moment)

    def delete(self) -> None:
        """Begins to stop the pod."""
        if not self.terminating:
            self._terminating.set()
            self._note(Moment.TERMINATING)

    async def kill(self) -> None:
        """Kills the container's processes as if the kernel had. The pod goes on with a new run."""
        await self.podman("kill", "--signal", "KILL", self.container)

    async def live(self) -> None:
        """Runs the pod until it is deleted."""
        for volume in self.template.spec.volumes:
            self._make(volume)
        try:
            while not self.terminating:
                await self._run_once()
                if not self.terminating:
                    await self._pause(restart_pause_s(self.restarts))
                    self.restarts += 1
        finally:
            shutil.rmtree(self.identity.folder, ignore_errors=True)
        self._note(Moment.GONE)

    def _make(self, volume: Volume) -> None:
        """Makes a volume as a kubelet does: what is in it belongs to fsGroup."""
        folder, group = self.identity.folder / volume.name, self.template.spec.security_context.fs_group or 0
        folder.mkdir(parents=True)
        if volume.secret is not None:
            content = self.secrets.get(volume.secret.secret_name)
            if content is None:
                raise ManifestError(f"{self.name}: there is no Secret {volume.secret.secret_name}")
            for key, value in content.items():
                file = folder / key
                file.write_text(value)
                os.chown(file, 0, group)
                file.chmod(volume.secret.default_mode)
        os.chown(folder, 0, group)
        folder.chmod(0o2777 if volume.secret is None else 0o2755)

    async def _pause(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._terminating.wait()

    async def _run_once(self) -> None:
        self._health = Health(self.template.container)
        self._failed_probe.clear()
        container = self.container
        arguments = container_arguments(self.template, self.identity, self.variables)
        try:
            with watched(await self.podman.start(container, arguments, self.log)) as ended:
                await self._watch(container, ended)
            self.status = await self.podman.status(container)
        finally:
            await self.podman.remove(container)
        self._note(Moment.ENDED)

    async def _watch(self, container: str, ended: asyncio.Event) -> None:
        """Asks the probes until the container has ended, and has it end if that is due."""
        self._running = True
        self._note(Moment.RUN)
        probing = [asyncio.create_task(self._ask(kind)) for kind in ProbeKind if self._health.probe(kind)]
        due = [asyncio.create_task(each.wait()) for each in (self._terminating, self._failed_probe, ended)]
        try:
            await asyncio.wait(due, return_when=asyncio.FIRST_COMPLETED)
            if not ended.is_set():
                await self._stop(container, ended)
        finally:
            await _cancel([*probing, *due])
            self._running = False

    @property
    def log(self) -> Path:
        """Returns where the present run's output goes."""
        return self.identity.folder.parent / f"{self.name}.{self.restarts}.log"

    async def _stop(self, container: str, ended: asyncio.Event) -> None:
        """preStop, SIGTERM, and SIGKILL at the end of the grace period."""
        deadline = time.monotonic() + self.template.spec.termination_grace_period_seconds
        hook = self.template.container.lifecycle
        if hook is not None and not ended.is_set():
            await self._run_hook(container, hook.pre_stop.exec.command, deadline)
        grace_s = max(_LEAST_GRACE_S, deadline - time.monotonic())
        for signal, wait_s in ((Moment.TERM_SENT, grace_s), (Moment.KILL_SENT, 30.0)):
            self._note(signal)
            # It may have ended at this very moment.
            with contextlib.suppress(PodmanError):
                await self.podman("kill", "--signal", signal.value, container)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await ended.wait()
            if ended.is_set():
                return
        raise PodmanError(f"{self.name} has not ended 30 s after SIGKILL")

    async def _run_hook(self, container: str, command: tuple[str, ...], deadline: float) -> None:
        # A hook that fails, or takes all of the grace period, is a warning in Kubernetes, and SIGTERM follows.
        with contextlib.suppress(PodmanError):
            await self.podman("exec", container, *command, timeout_s=deadline - time.monotonic())

    async def _ask(self, kind: ProbeKind) -> None:
        health = self._health
        probe = health.probe(kind)
        assert probe is not None
        await asyncio.sleep(probe.initial_delay_seconds)
        while True:
            if health.asks(kind):
                good = await self._answers(probe)
                before = health.started, health.ready
                if health.asks(kind):
                    health.answered(kind, good)
                self._tell_changes(before)
            await asyncio.sleep(probe.period_seconds)

    def _tell_changes(self, before: tuple[bool, bool]) -> None:
        started, ready = before
        if self._health.started and not started:
            self._note(Moment.STARTED)
        if self._health.ready != ready:
            self._note(Moment.READY if self._health.ready else Moment.NOT_READY)
        if self._health.must_restart and not self._failed_probe.is_set():
            self._failed_probe.set()
            self._note(Moment.PROBE_FAILED)

    async def _answers(self, probe: Probe) -> bool:
        get = probe.http_get
        url = f"{get.scheme.lower()}://{self.identity.address}:{self.template.container.port(get.port)}{get.path}"
        timeout = aiohttp.ClientTimeout(total=probe.timeout_seconds)
        try:
            async with self.probes.get(url, timeout=timeout, allow_redirects=False) as response:
                return 200 <= response.status < 400
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _note(self, moment: Moment) -> None:
        self.moments.append((time.monotonic(), moment))
        self.tell(self, moment)


async def _cancel(tasks: list[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
