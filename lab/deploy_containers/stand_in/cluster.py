"""The manifests' workloads, kept as a cluster's controllers would keep them, with pods in containers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import msgspec

from lab.deploy_containers.stand_in.container_arguments import Identity, Secrets, environment, exclusive_cores
from lab.deploy_containers.stand_in.manifests import Manifests, Template, Workload, WorkloadKind, WorkloadSpec, named
from lab.deploy_containers.stand_in.names import name_server
from lab.deploy_containers.stand_in.packet_rules import Endpoint, packet_rules
from lab.deploy_containers.stand_in.pod import Moment, Pod
from lab.deploy_containers.stand_in.pod_network import SERVICES, PodNetwork, socket_on
from lab.deploy_containers.stand_in.podman import Podman
from lab.deploy_containers.stand_in.rollouts import PodState, next_changes
from lab.deploy_containers.stand_in.services import Backend, balancers, records
from tests.hosts.namespaces import Host

RESTARTED_AT = "kubectl.kubernetes.io/restartedAt"
"""The annotation by which ``kubectl rollout restart`` makes a template a new one."""

_NAME_SERVER = Endpoint("name-server", "", "kube-system", {"k8s-app": "kube-dns"}, {"dns": 53, "dns-tcp": 53})


@dataclass
class Cluster:
    """Lives as long as ``running``."""

    manifests: Manifests
    secrets: Secrets
    folder: Path
    podman: Podman
    network: PodNetwork
    tell: Callable[[Pod, Moment], None]
    """Hears of everything that happens to a pod."""
    pods: dict[str, Pod] = field(default_factory=dict)
    gone: list[Pod] = field(default_factory=list)
    """The pods that were, oldest first."""
    listeners: list[Callable[[], None]] = field(default_factory=list)
    """They are called after each change."""
    strangers: dict[str, Endpoint] = field(default_factory=dict)
    """Who has an address beside the manifests' pods."""
    _hosts: dict[str, Host] = field(default_factory=dict)
    _wanted: dict[str, WorkloadSpec] = field(default_factory=dict)
    """What has been changed since the manifests were applied."""
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._service_addresses = {
            service.metadata.name: f"{SERVICES}.{i}" for i, service in enumerate(self.manifests.services, 10)
        }
        self._changed = asyncio.Event()
        self._condition = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def workload(self, name: str) -> Workload:
        """Returns a workload as it is wanted now."""
        found = named(self.manifests.workloads, name)
        return msgspec.structs.replace(found, spec=self._wanted.get(name, found.spec))

    @property
    def workloads(self) -> list[str]:
        return [workload.metadata.name for workload in self.manifests.workloads]

    def service_address(self, name: str) -> str:
        return self._service_addresses[name]

    def pods_of(self, workload: str) -> list[Pod]:
        """Returns the pods of a workload that are there, the lowest ordinal first."""
        return sorted((pod for pod in self.pods.values() if pod.workload == workload), key=lambda pod: pod.ordinal)

    def restart(self, workload: str, at: str) -> None:
        """Does what ``kubectl rollout restart`` does."""
        spec = self.workload(workload).spec
        annotations = {**spec.template.metadata.annotations, RESTARTED_AT: at}
        metadata = msgspec.structs.replace(spec.template.metadata, annotations=annotations)
        template = msgspec.structs.replace(spec.template, metadata=metadata)
        self._want(workload, msgspec.structs.replace(spec, template=template))

    def scale(self, workload: str, replicas: int) -> None:
        """Does what ``kubectl scale`` does."""
        self._want(workload, msgspec.structs.replace(self.workload(workload).spec, replicas=replicas))

    def _want(self, workload: str, spec: WorkloadSpec) -> None:
        self._wanted[workload] = spec
        self._changed.set()

    def settled(self, workload: str) -> bool:
        """Returns whether a workload's pods are those that are wanted, and all are ready."""
        wanted = self.workload(workload)
        revision = _revision(wanted.spec.template)
        pods = self.pods_of(workload)
        return len(pods) == wanted.spec.replicas and all(
            pod.ready and not pod.terminating and pod.revision == revision for pod in pods
        )

    @property
    def all_settled(self) -> bool:
        return all(self.settled(workload) for workload in self.workloads)

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Waits for something that pods become."""
        try:
            async with asyncio.timeout(timeout_s), self._condition:
                while not condition():
                    if self._failure is not None:
                        raise self._failure
                    await self._condition.wait()
        except TimeoutError as exc:
            raise AssertionError(f"did not happen in {timeout_s:g} s: {what}") from exc

    def host(self, name: str) -> Host:
        """Returns where a pod or a stranger has its network."""
        return self._hosts[name]

    def add_stranger(self, stranger: Endpoint) -> Host:
        """Returns a host beside the manifests' pods, with an address that it gets now."""
        host = self.network.add(stranger.name)
        self._hosts[stranger.name] = host
        self.strangers[stranger.name] = replace(stranger, address=host.address)
        self._changed.set()
        return host

    @property
    def endpoints(self) -> list[Endpoint]:
        return [*(pod.endpoint for pod in self.pods.values()), *self.strangers.values()]

    @property
    def _backends(self) -> list[Backend]:
        return [pod.backend for pod in self.pods.values()]

    async def _control(self) -> None:
        """Acts on each change."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                for workload in self.workloads:
                    self._reconcile(workload)
                self._route()
                for listener in self.listeners:
                    listener()
                async with self._condition:
                    self._condition.notify_all()
        except BaseException as exc:
            await self._fail(exc)
            raise

    async def _fail(self, exc: BaseException) -> None:
        self._failure = self._failure or exc
        async with self._condition:
            self._condition.notify_all()

    def _reconcile(self, name: str) -> None:
        workload = self.workload(name)
        revision = _revision(workload.spec.template)
        changes = next_changes(workload, revision, [self._state(pod, workload) for pod in self.pods_of(name)])
        for ordinal in changes.create:
            self._create(workload, ordinal, revision)
        for pod in changes.delete:
            self.pods[pod].delete()

    def _state(self, pod: Pod, workload: Workload) -> PodState:
        """Returns a pod as its controller sees it. A Deployment's pod counts once it has been ready for a while."""
        ready = pod.ready
        if ready and (wait_s := pod.last(Moment.READY) + workload.spec.min_ready_seconds - time.monotonic()) > 0:
            ready = False
            asyncio.get_running_loop().call_later(wait_s, self._changed.set)
        return PodState(pod.name, pod.ordinal, pod.revision, ready, pod.terminating)

    def _create(self, workload: Workload, ordinal: int, revision: str) -> None:
        middle = "" if workload.kind is WorkloadKind.STATEFUL_SET else f"-{revision}"
        name = f"{workload.metadata.name}{middle}-{ordinal}"
        host = self.network.add(name)
        self._hosts[name] = host
        template = workload.spec.template
        identity = Identity(
            name=name,
            namespace=workload.metadata.namespace,
            address=host.address,
            network=f"/run/netns/{host.namespace}",
            folder=self.folder / name,
            cores=self._cores(exclusive_cores(template.container)),
            name_server=self.strangers[_NAME_SERVER.name].address,
        )
        variables = environment(template, identity, self.manifests, self.secrets)
        pod = Pod(
            identity=identity,
            workload=workload.metadata.name,
            ordinal=ordinal,
            revision=revision,
            template=template,
            variables=variables,
            podman=self.podman,
            probes=self._probes,
            tell=self._heard,
            secrets=self.secrets,
        )
        self.pods[name] = pod
        self._changed.set()
        task = asyncio.create_task(self._live(pod))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cores(self, count: int) -> Sequence[int]:
        """Returns cores for a pod alone; where there are too few, those that the fewest pods have."""
        there = sorted(os.sched_getaffinity(0))
        used = [core for pod in self.pods.values() for core in pod.identity.cores]
        return sorted(sorted(there, key=used.count)[:count])

    async def _live(self, pod: Pod) -> None:
        try:
            await pod.live()
        except Exception as exc:
            await self._fail(exc)
        finally:
            del self.pods[pod.name]
            self.gone.append(pod)
            self.network.remove(self._hosts.pop(pod.name))
            self._changed.set()

    def _heard(self, pod: Pod, moment: Moment) -> None:
        self._changed.set()
        self.tell(pod, moment)

    def _route(self) -> None:
        rules = balancers(self.manifests.services, self._service_addresses, self._backends)
        self.network.apply(packet_rules(rules, self.manifests.policies, self.endpoints))

    def _records(self) -> dict[str, list[str]]:
        return records(self.manifests.services, self._service_addresses, self._backends)

    async def stop(self, timeout_s: float) -> None:
        """Stops all pods as ``kubectl delete`` does, and waits until they are gone."""
        for workload in self.workloads:
            self.scale(workload, 0)
        for pod in self.pods.values():
            pod.delete()
        await self.until(lambda: not self.pods, "all pods are gone", timeout_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the workloads during the block, and removes whatever is left of them at its end."""
        await self.podman.remove_all()
        host = self.add_stranger(_NAME_SERVER)
        router = self.network.router
        connector = aiohttp.TCPConnector(force_close=True, limit=0, socket_factory=lambda _: socket_on(router))
        with socket_on(host, socket.SOCK_DGRAM) as server:
            server.bind((host.address, 53))
            async with aiohttp.ClientSession(connector=connector) as self._probes:
                self._changed.set()
                control = asyncio.create_task(self._control())
                try:
                    with name_server(server, self._records):
                        yield
                finally:
                    for task in [control, *self._tasks]:
                        task.cancel()
                    await asyncio.gather(control, *self._tasks, return_exceptions=True)
                    await self.podman.remove_all()


def _revision(template: Template) -> str:
    return hashlib.sha256(msgspec.json.encode(template)).hexdigest()[:8]
