"""Runs all checks, in the order of the report."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from pdserve.config import CacheConfig, DoctorConfig, KvReturn, Switch, TransferConfig
from pdserve.doctor import machine, network, probe, ucx
from pdserve.doctor.cluster import check_instances, prefill_controls, read_instances
from pdserve.doctor.finding import Finding, Verdict, not_applicable, ok, problem, warning
from pdserve.doctor.machine import LimitFacts
from pdserve.doctor.peers import check_peer, read_peer, same_machine
from pdserve.doctor.probe import StandIn, standing_in
from pdserve.doctor.ucx import UcxTools, Yardstick
from pdserve.errors import TransferError
from pdserve.http.tls import Trust, read_authorities
from pdserve.wire.transfer import EngineSpec, Examined
from pdserve_kvtransfer.configuration import configured_ucx
from pdserve_kvtransfer.probe.examiner import Examiner
from pdserve_kvtransfer.region import machine_identity
from pdserve_kvtransfer.ucx.rdma_ports import read_rdma

_BLOCK_BYTES = 360 * 1024
"""The size of a KV block of the demo model, which is probed where no peer names its own block size."""
_LOCAL = "here"


@dataclass(frozen=True, slots=True)
class Examination:
    """What ``pdserve doctor`` found."""

    version: str
    host: str
    examined: str
    """The date and time of the examination, in UTC."""
    findings: tuple[Finding, ...]
    probes: tuple[probe.ProbeFacts, ...]

    @property
    def healthy(self) -> bool:
        return all(finding.verdict is not Verdict.PROBLEM for finding in self.findings)


def examine(
    config: DoctorConfig, environ: Mapping[str, str], secret: bytes | str, ours: EngineSpec | None
) -> Examination:
    """Runs all checks. ``secret`` is the cluster's, or why there is none; ``ours`` is the model that peers need."""
    return _Doctor(config, environ, secret, ours).examine()


class _Doctor:
    """The state that the checks share, and what they have found so far."""

    def __init__(
        self, config: DoctorConfig, environ: Mapping[str, str], secret: bytes | str, ours: EngineSpec | None
    ) -> None:
        self._config = config
        self._environ = environ
        self._secret = secret
        self._ours = ours
        self._tls = config.transfer.ucx_tls or environ.get("UCX_TLS", "")
        self._software = machine.read_software(environ)
        self._tools: UcxTools | None = ucx.read_tools(self._software.ucx)
        self._limits: LimitFacts = machine.read_limits()
        self._yardsticks: dict[tuple[str, int], Yardstick | None] = {}
        self._findings: list[Finding] = []
        self._probes: list[probe.ProbeFacts] = []

    def examine(self) -> Examination:
        usable = self._machine()
        controls = self._controls()
        self._network(controls)
        if usable:
            self._peers(controls)
        return Examination(
            version=version("pdserve"),
            host=socket.gethostname(),
            examined=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
            findings=tuple(self._findings),
            probes=tuple(self._probes),
        )

    def _machine(self) -> bool:
        """Returns False if UCX cannot be used here, so that no peer can be asked."""
        facts = self._software
        ports = read_rdma()
        gpus = machine.read_gpus()
        self._findings += machine.check_software(facts)
        self._findings.append(ucx.check_tools(self._tools))
        usable = not facts.ucx_error and self._ucx(tuple(dict.fromkeys(port.device for port in ports)), len(gpus.names))
        self._findings += machine.check_limits(self._limits, rdma=bool(ports))
        self._findings += ucx.check_rdma(ports)
        self._findings += machine.check_cores(machine.read_cores(self._config.cpu.cores))
        self._findings.append(machine.check_core_ledger(self._config.cpu.core_ledger))
        self._findings.append(machine.check_gpus(gpus))
        self._findings.append(check_kv_return(self._config.transfer, self._config.cache))
        return usable

    def _ucx(self, rdma_devices: tuple[str, ...], gpus: int) -> bool:
        lanes, error = ucx.read_ucx(self._config.transfer)
        ask = self._tools.ask if self._tools else lambda *_: ""
        facts = ucx.UcxFacts(
            tls=self._tls,
            usable=lanes,
            error=error,
            all_transports=ucx.parse_transports(ask(self._environ, "", "-d")),
            loaded=self._software.ucx,
            rdma_devices=rdma_devices,
            gpus=gpus,
        )
        self._findings += ucx.check_ucx(facts)
        return not error

    def _controls(self) -> list[str]:
        """Returns the control address of every peer, named or registered."""
        asked = self._config.diagnosis
        controls = list(asked.peers)
        if asked.proxy_url:
            found = read_instances(
                asked.proxy_url, asked.timeout_s, Trust(read_authorities(self._config.trust.authorities))
            )
            self._findings += check_instances(asked.proxy_url, found)
            controls += [] if isinstance(found, str) else prefill_controls(found)
        return list(dict.fromkeys(controls))

    def _network(self, controls: Sequence[str]) -> None:
        routes = [network.read_route(host) for host in dict.fromkeys(map(network.host_of, controls))]
        beyond = any(route.address and route.address != route.source for route in routes)
        listening = network.read_listening(self._config.transfer)
        self._findings += network.check_listening(listening, peers_beyond=beyond)
        self._findings += network.check_routes(routes)

    def _peers(self, controls: Sequence[str]) -> None:
        if not controls:
            self._findings.append(not_applicable("peers", "none named: --peer tcp://host:port or --proxy-url"))
            self._probe_here()
        elif isinstance(self._secret, str):
            self._findings.append(problem("peers", self._secret, "give --secret-file or PDSERVE_SECRET"))
        else:
            for control in controls:
                self._peer(control, self._secret)

    def _peer(self, control: str, secret: bytes) -> None:
        asked = self._config.diagnosis
        try:
            with Examiner(control, secret, configured_ucx(self._config.transfer)) as asker:
                facts = read_peer(asker, control, self._ours, asked.timeout_s)
                self._findings += check_peer(facts, self._ours, version("pdserve"))
                if facts.examined is not None and asked.probe is Switch.ON:
                    self._probe(asker, control, facts.examined, facts.examined.block_bytes)
        except TransferError as exc:
            self._findings.append(problem(f"peer {control}", str(exc), "see --peer and --ucx-tls"))

    def _probe_here(self) -> None:
        transfer = self._config.transfer
        if self._config.diagnosis.probe is Switch.OFF:
            return
        told = StandIn(secrets.token_hex(32).encode(), _over_the_same_ucx(transfer), _BLOCK_BYTES)
        try:
            with (
                standing_in(told, self._environ) as control,
                Examiner(control, told.secret, configured_ucx(transfer)) as asker,
            ):
                found = asker.examine(self._config.diagnosis.timeout_s)
                if found is None:
                    raise TransferError("the local probe does not answer")
                self._probe(asker, _LOCAL, found, _BLOCK_BYTES)
        except TransferError as exc:
            self._findings.append(problem(f"probe {_LOCAL}", str(exc), "see UCX transports above, and --ucx-tls"))

    def _probe(self, asker: Examiner, peer: str, found: Examined, block_bytes: int) -> None:
        asked = self._config.diagnosis
        size = probe.message_size(block_bytes)
        measured, error = probe.read_probe(asker, size, asked.probe_mib, asked.timeout_s)
        identity = machine_identity()
        near = same_machine(found, identity)
        tls = self._tls if near or measured is None else probe.transports_of(measured.lanes)
        facts = probe.ProbeFacts(
            peer=peer,
            measured=measured,
            error=error,
            yardstick=self._yardstick(tls, size) if measured is not None else None,
            same_machine=near,
            same_ipc_namespace=found.ipc_namespace == identity.ipc_namespace,
            tls=self._tls,
            mbit_per_s=0 if peer == _LOCAL else network.read_route(network.host_of(peer)).mbit_per_s,
        )
        self._probes.append(facts)
        self._findings += probe.check_probe(facts, self._limits)

    def _yardstick(self, tls: str, size: int) -> Yardstick | None:
        if self._tools is None:
            return None
        if (tls, size) not in self._yardsticks:
            self._yardsticks[tls, size] = ucx.read_yardstick(self._tools, self._environ, tls, size)
        return self._yardsticks[tls, size]


def _over_the_same_ucx(config: TransferConfig) -> TransferConfig:
    """Returns ``config`` for a process on this machine, whatever address ``config`` is for."""
    return TransferConfig(
        ucx_tls=config.ucx_tls,
        ucx_net_devices=config.ucx_net_devices,
        ucx_tcp_ports=config.ucx_tcp_ports,
        ucx_rails=config.ucx_rails,
    )


def check_kv_return(transfer: TransferConfig, cache: CacheConfig) -> Finding:
    if transfer.kv_return is KvReturn.OFF:
        return ok("KV return", "off: a node that goes on with an answer replays its tokens")
    if cache.prefix_cache is Switch.ON:
        return ok("KV return", "on: prefill nodes keep the KV blocks of answers in their prefix caches")
    if transfer.kv_return is KvReturn.ON:
        return problem(
            "KV return", "it is on, and the prefix cache is off: nodes do not start", "set --prefix-cache on"
        )
    return warning("KV return", "off, because the prefix cache is off", "set --prefix-cache on")
