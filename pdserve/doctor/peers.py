"""Checks that a named prefill node can be reached, is authenticated, and fits."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pdserve.compiled_library import can_be_built
from pdserve.config import CacheConfig, CpuKernels, ModelConfig
from pdserve.control.frame import MAX_AGE_S
from pdserve.doctor.finding import Finding, ok, problem, warning
from pdserve.errors import HandshakeRefused, TransferError
from pdserve.models.backend import choose_device
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.fingerprint import fingerprint
from pdserve.models.checkpoint.model_files import resolve_model
from pdserve.models.checkpoint.weights import stays_in_blocks
from pdserve.models.rank_cache import compared_dtype, compared_groups
from pdserve.wire.transfer import EngineSpec, Examined
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
from pdserve_kernels.cpu.library import CPU_KERNELS
from pdserve_kvtransfer.control.handshake import misfits
from pdserve_kvtransfer.probe.examiner import Examiner
from pdserve_kvtransfer.region import MachineIdentity

_CLOCK_WARNING_S = 5.0
_ADVICE = {
    "protocol": "run the same version of pdserve on both, or one that is a minor version older",
    "fingerprint": "give both the same --model in the same form: the same folder's files, or the same .gguf; a digest "
    "that begins with 'blocks-' is of weights that stay quantised, which --weights dequantise on both sides ends, "
    "and one with 'long-' is of a model that turns otherwise in long contexts: give both the same --max-model-len",
    "dtype": "give both the same --dtype and --kv-cache-dtype",
    "block_size": "give both the same --block-size",
    "groups": "run the same version of pdserve on both: they divide the model's layers otherwise",
}


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What one prefill node answered."""

    control: str
    connect_error: str
    """Why there is no TCP connection; empty if there was one."""
    examined: Examined | None
    """The peer's authenticated answer; None if there was none."""
    refused: HandshakeRefused | None
    """The peer's refusal of the handshake; None if it did not refuse."""
    handshake: bool
    """Whether the handshake of a decode engine succeeded."""
    broken: str
    """Why the exchange of messages broke off; empty if it did not."""
    round_trip_s: float
    """The round-trip time of a control message; 0 if it is unknown."""
    clock_ahead_s: float
    """How far the peer's clock is ahead of this machine's."""


def read_peer(asker: Examiner, control: str, ours: EngineSpec | None, timeout_s: float) -> PeerFacts:
    """``ours`` is what a decode engine here would be. If it is None, the peer's own is used, to check only the way."""
    examined: Examined | None = None
    refused: HandshakeRefused | None = None
    handshake, broken, round_trip_s, ahead_s = False, "", 0.0, 0.0
    error = _connect_error(control, timeout_s)
    if not error:
        try:
            asked = time.time()
            examined = asker.examine(timeout_s)
            if examined is not None:
                ahead_s = examined.clock_ms / 1000 - (asked + time.time()) / 2
                handshake = asker.greet(ours or _like(examined.spec), examined.boot_id, timeout_s)
            if handshake:
                round_trip_s = asker.control_round_trip_s(timeout_s) or 0.0
        except HandshakeRefused as exc:
            refused = exc
        except TransferError as exc:
            broken = str(exc)
    return PeerFacts(control, error, examined, refused, handshake, broken, round_trip_s, ahead_s)


def _like(spec: EngineSpec) -> EngineSpec:
    """Returns what an engine here would have to be to fit ``spec``."""
    return msgspec.structs.replace(spec, protocol=PROTOCOL_VERSION, oldest_protocol=OLDEST_PROTOCOL, tp_size=1)


def _connect_error(control: str, timeout_s: float) -> str:
    parts = urlsplit(control)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout_s).close()
    except TimeoutError:
        return "no answer to a TCP connection"
    except OSError as exc:
        return "nobody listens there" if exc.errno == errno.ECONNREFUSED else exc.strerror or str(exc)
    return ""


def same_machine(examined: Examined, identity: MachineIdentity) -> bool:
    return bool(identity.machine) and examined.machine == identity.machine


def check_peer(facts: PeerFacts, ours: EngineSpec | None, version: str) -> list[Finding]:
    """``version`` is that of this pdserve."""
    check = f"peer {facts.control.removeprefix('tcp://')}"
    if facts.connect_error:
        return [problem(check, facts.connect_error, _reach(facts))]
    if facts.examined is None:
        return [_silent(facts, check)]
    findings = [_version(facts.examined, check, version), _clock(facts, check)]
    findings += _misfits(facts.examined.spec, ours, check) if ours else [_spec(facts.examined, check)]
    return [*findings, *_handshake(facts, check, named=len(findings) > 2 and bool(ours))]


def _reach(facts: PeerFacts) -> str:
    if facts.connect_error == "nobody listens there":
        return (
            "see that the prefill node runs, that its --transfer-host is not 127.0.0.1, and its --transfer-port: "
            "the proxy's /instances names its control address"
        )
    return "see the name, the route and the firewall: the port of --transfer-port, and those of UCX"


def _silent(facts: PeerFacts, check: str) -> Finding:
    if facts.broken:
        return problem(check, facts.broken, "see that this is a prefill node's control address, and the node's log")
    return problem(
        check,
        "it takes connections and does not answer signed messages",
        "another secret (its log then says 'wrong signature'): give both the same --secret-file or PDSERVE_SECRET; or "
        f"clocks more than {MAX_AGE_S:.0f} s apart: synchronise them; or the node hangs; or it is no prefill node",
    )


def _version(examined: Examined, check: str, version: str) -> Finding:
    if examined.version != version:
        return warning(check, f"pdserve {examined.version} there, {version} here", _ADVICE["protocol"])
    return ok(check, f"reached, the same secret, pdserve {examined.version} like here")


def _clock(facts: PeerFacts, check: str) -> Finding:
    ahead_s = facts.clock_ahead_s
    seen = f"its clock is {abs(ahead_s):.3f} s {'ahead' if ahead_s >= 0 else 'behind'}"
    if abs(ahead_s) > _CLOCK_WARNING_S:
        return warning(check, seen, f"synchronise the hosts' clocks: {MAX_AGE_S:.0f} s apart, no message is believed")
    return ok(check, seen)


def _spec(examined: Examined, check: str) -> Finding:
    spec = examined.spec
    fields = f"{spec.dtype}, blocks of {spec.block_size} tokens, {spec.num_layers} layers, {spec.kv_heads} KV heads"
    if spec.groups:
        fields += f", cache groups {', '.join(group.name for group in spec.groups)}"
    return ok(check, f"model {spec.fingerprint[:12]}, {fields}, {_ranks(spec.tp_size)} (compare with --model)")


def _misfits(theirs: EngineSpec, ours: EngineSpec, check: str) -> list[Finding]:
    """Reports every field that differs, whereas the handshake names only the first."""
    findings = []
    for refused in misfits(ours, theirs):
        advice = _ADVICE.get(refused.field, _ADVICE["groups" if "cache group" in refused.field else "fingerprint"])
        seen = f"{refused.field} is {_short(refused.theirs)} there and {_short(refused.ours)} here"
        findings.append(problem(check, seen, advice))
    return findings or [ok(check, f"the same model, dtype and block size; {_ranks(theirs.tp_size)} there")]


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:16]}…" if len(text) > 20 else text


def _handshake(facts: PeerFacts, check: str, *, named: bool) -> list[Finding]:
    """``named`` says whether the reason of a refusal is among the findings already."""
    if facts.handshake:
        trip = f", {facts.round_trip_s * 1e6:.0f} µs there and back" if facts.round_trip_s else ""
        return [ok(check, f"the handshake stands{trip}")]
    if facts.refused is not None:
        refused = facts.refused
        seen = f"the handshake is refused for {refused.field}"
        advice = "see above" if named else f"{refused.ours} here, {refused.theirs} there"
        return [problem(check, seen, advice)]
    seen = facts.broken or "the handshake was not answered"
    return [problem(check, seen, "see the log of the prefill node, and --ucx-tls on both sides")]


def local_spec(model: ModelConfig, cache: CacheConfig, kernels: CpuKernels, cache_dir: Path) -> EngineSpec:
    """Returns the specification of one rank. ``cache_dir`` has the digests of weights.

    Raises ModelError if there is no such model, and ConfigError if its device is not there.
    """
    folder = resolve_model(model.path)
    decoder = read_decoder_config(folder)
    on_gpu = choose_device(model.device).type != "cpu"
    multiplied = on_gpu or (kernels is not CpuKernels.TORCH and can_be_built(CPU_KERNELS))
    digest = fingerprint(
        folder,
        cache_dir,
        in_blocks=stays_in_blocks(folder, model, kernels=multiplied, on_gpu=on_gpu),
        long_contexts=decoder.turns_for_long_contexts(model.max_model_len or decoder.max_positions),
    )
    return EngineSpec(
        protocol=PROTOCOL_VERSION,
        oldest_protocol=OLDEST_PROTOCOL,
        fingerprint=digest,
        dtype=compared_dtype(model.dtype, cache.kv_cache_dtype),
        block_size=cache.block_size,
        num_layers=decoder.cached_layers,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        tp_size=1,
        groups=compared_groups(decoder, model.dtype, cache.block_size, cache.kv_cache_dtype),
    )
