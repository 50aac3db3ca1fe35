"""Tests peers that fit, do not fit, have another secret, are older, or do not answer."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from pdserve.config import CacheConfig, CpuKernels, ModelConfig
from pdserve.doctor.finding import Finding, Verdict
from pdserve.doctor.peers import PeerFacts, check_peer, local_spec, read_peer, same_machine
from pdserve.wire.cache_groups import GroupSpec, Keep
from pdserve.wire.transfer import EngineSpec, Examine, Examined, Hello, Refused
from pdserve.wire.version import SPOKEN
from pdserve_kvtransfer.probe.examiner import Examiner
from pdserve_kvtransfer.region import MachineIdentity, machine_identity
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from tests.kvtransfer.fakes import FakePrefill
from tests.kvtransfer.rig import SECRET, SPEC, WAIT_S, engine
from tests.models.tiny_families import save_tiny

VERSION = "0.1.0"
EXAMINED = Examined(
    boot_id=bytes(16),
    version=VERSION,
    spec=SPEC,
    block_bytes=4096,
    clock_ms=0,
    machine="m",
    ipc_namespace="ipc:[1]",
)
FITTING = PeerFacts(
    control="tcp://10.0.0.7:8200",
    connect_error="",
    examined=EXAMINED,
    refused=None,
    handshake=True,
    broken="",
    round_trip_s=1e-4,
    clock_ahead_s=0.01,
)


def asked(control: str, ours: EngineSpec | None, secret: bytes = SECRET, timeout_s: float = WAIT_S) -> PeerFacts:
    with Examiner(control, secret, UcxTransport("")) as asker:
        return read_peer(asker, control, ours, timeout_s)


def problems(facts: PeerFacts, ours: EngineSpec | None = SPEC) -> list[Finding]:
    return [found for found in check_peer(facts, ours, VERSION) if found.verdict is Verdict.PROBLEM]


def test_a_peer_that_fits() -> None:
    with engine() as prefill:
        named, unnamed = asked(prefill.address, SPEC), asked(prefill.address, None)
    for facts in (named, unnamed):
        assert facts.handshake and facts.examined is not None and facts.round_trip_s > 0
        assert abs(facts.clock_ahead_s) < 5.0, "it is the same clock"
        assert same_machine(facts.examined, machine_identity())
    assert problems(named) == []
    said = [found.seen for found in check_peer(unnamed, None, VERSION)]
    assert any("model model-a" in seen and "--model" in seen for seen in said)


def test_every_field_that_differs_is_named_with_both_values() -> None:
    ours = msgspec.structs.replace(SPEC, fingerprint="b" * 64, dtype="fp32", block_size=32, tp_size=4)
    with engine() as prefill:
        facts = asked(prefill.address, ours)
    assert facts.refused is not None and facts.refused.field == "fingerprint"
    found = problems(facts, ours)
    said = [finding.seen for finding in found]
    assert said == [
        "fingerprint is model-a there and bbbbbbbbbbbbbbbb… here",
        "dtype is bf16 there and fp32 here",
        "block_size is 16 there and 32 here",
        "the handshake is refused for fingerprint",
    ]
    assert [finding.advice for finding in found][1:] == [
        "give both the same --dtype and --kv-cache-dtype",
        "give both the same --block-size",
        "see above",
    ]


def test_cache_groups_are_shown_and_compared() -> None:
    groups = (
        GroupSpec("all", Keep.ALL, 2, 2, 64, "bf16"),
        GroupSpec("window 128", Keep.WINDOW, 2, 2, 64, "bf16", 128),
    )
    theirs = msgspec.structs.replace(SPEC, groups=groups)
    facts = replace(FITTING, examined=msgspec.structs.replace(EXAMINED, spec=theirs))
    assert any("cache groups all, window 128" in found.seen for found in check_peer(facts, None, VERSION))
    wider = (groups[0], msgspec.structs.replace(groups[1], window=64))
    (found,) = problems(facts, msgspec.structs.replace(SPEC, groups=wider))
    assert found.seen == "cache group 'window 128': window is 128 there and 64 here"
    assert "same version" in found.advice


def test_another_secret() -> None:
    with engine() as prefill:
        facts = asked(prefill.address, SPEC, b"another secret, of another cluster", timeout_s=0.3)
    (found,) = problems(facts)
    assert "does not answer signed messages" in found.seen
    assert "another secret" in found.advice and "clocks" in found.advice


def test_nobody_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        facts = asked(f"tcp://127.0.0.1:{closed.getsockname()[1]}", SPEC)
    (found,) = problems(facts)
    assert found.seen == "nobody listens there"
    assert "--transfer-host" in found.advice


def test_a_pdserve_without_a_common_version_is_named_with_its_range() -> None:
    far = msgspec.structs.replace(SPEC, protocol=SPOKEN.newest + 2, oldest_protocol=SPOKEN.newest + 1)
    with FakePrefill() as other, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(asked, other.target.control, SPEC)
        other.next(Examine)
        other.send(msgspec.structs.replace(EXAMINED, boot_id=other.boot_id, spec=far))
        other.next(Hello)
        other.send(Refused(other.boot_id, "protocol", str(far.spoken), str(SPOKEN)))
        facts = asking.result(WAIT_S)
    found = problems(facts)
    assert found[0].seen == f"protocol is {far.spoken} there and {SPOKEN} here"
    assert "same version" in (found[0].advice or "")


def test_what_is_no_prefill_node() -> None:
    broken = replace(FITTING, examined=None, handshake=False, broken="the prefill node closed the connection")
    (found,) = problems(broken)
    assert "control address" in found.advice


def test_versions_and_clocks() -> None:
    newer = replace(FITTING, examined=msgspec.structs.replace(EXAMINED, version="0.2.0"), clock_ahead_s=-30.0)
    warnings = [found for found in check_peer(newer, SPEC, VERSION) if found.verdict is Verdict.WARNING]
    assert [found.seen for found in warnings] == ["pdserve 0.2.0 there, 0.1.0 here", "its clock is 30.000 s behind"]


def test_a_handshake_without_an_answer() -> None:
    (found,) = problems(replace(FITTING, handshake=False))
    assert "not answered" in found.seen


def test_a_machine_that_does_not_say_what_it_is_is_another() -> None:
    assert not same_machine(msgspec.structs.replace(EXAMINED, machine=""), MachineIdentity("", ""))
    assert same_machine(EXAMINED, MachineIdentity("m", "ipc:[2]"))


def test_a_model_that_turns_otherwise_in_long_contexts_fits_its_like(tmp_path: Path) -> None:
    folder = save_tiny("phi3-long", tmp_path / "model")
    at, beyond, unlimited = (
        local_spec(ModelConfig(str(folder), max_model_len=length), CacheConfig(), CpuKernels.TORCH, tmp_path)
        for length in (32, 33, 0)
    )
    assert beyond == unlimited
    assert beyond.fingerprint == "long-" + at.fingerprint
