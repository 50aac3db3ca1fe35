"""Tests that a node carries out commands that its cluster has signed for it, once, and no others."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest

from pdserve.api.node.commands import CommandGate, check_role, is_confined
from pdserve.config import DiscoveryConfig, TransferConfig
from pdserve.control.frame import MAX_AGE_S, Purpose, Sealer, to_header
from pdserve.errors import InvalidRequest, Unauthorized
from pdserve.wire.command import Command, CommandSigner, Drain, Recall, SetRole
from pdserve.wire.discovery import NodeHeartbeat, NodeLoad, Role
from pdserve.wire.ids import new_id

SECRET = b"a cluster secret"
NODE = new_id()
DECODE = SetRole(Role.DECODE)


def gate(late_s: float = 0.0) -> CommandGate:
    """Returns the gate of a node whose clock is ahead by ``late_s``."""
    return CommandGate(SECRET, NODE, clock=lambda: time.time() + late_s)


def refusal(at: CommandGate, value: str | None) -> Unauthorized:
    with pytest.raises(Unauthorized) as raised:
        at.admit(value)
    return raised.value


def sealed(
    message: msgspec.Struct,
    *,
    secret: bytes = SECRET,
    purpose: Purpose = Purpose.COMMAND,
    receiver: bytes | None = NODE,
) -> str:
    return to_header(Sealer(secret, purpose, new_id()).seal(message, receiver))


@pytest.mark.parametrize("command", [SetRole(Role.PREFILL), DECODE, SetRole(Role.MIXED), Drain(), Recall("chat-1")])
def test_a_signed_command_is_taken_once(command: Command) -> None:
    at, value = gate(), CommandSigner(SECRET).sign(command, NODE)
    assert at.admit(value) == command
    assert "replayed" in refusal(at, value).message


def test_commands_may_overtake_each_other() -> None:
    signer, at = CommandSigner(SECRET), gate()
    first, second = signer.sign(DECODE, NODE), signer.sign(Drain(), NODE)
    assert (at.admit(second), at.admit(first)) == (Drain(), DECODE)


def test_a_command_for_another_start_of_the_node_is_refused() -> None:
    assert "another start" in refusal(gate(), CommandSigner(SECRET).sign(Drain(), new_id())).message


@pytest.mark.parametrize("late_s", [MAX_AGE_S + 5, -MAX_AGE_S - 5])
def test_an_expired_command_is_refused(late_s: float) -> None:
    assert "s old by this host" in refusal(gate(late_s), CommandSigner(SECRET).sign(Drain(), NODE)).message


def test_a_command_is_good_within_the_difference_of_clocks() -> None:
    assert gate(MAX_AGE_S - 5).admit(CommandSigner(SECRET).sign(Drain(), NODE)) == Drain()


class LaterDrain(Drain, frozen=True, tag_field="kind", tag="drain"):
    within_s: float = 5.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: "",
        lambda: "not base64 \u00fc",
        lambda: "AAAA",
        lambda: "A" * 5_000,
        lambda: sealed(Drain(), secret=b"another secret"),
        lambda: sealed(Drain(), purpose=Purpose.TICKET),
        lambda: sealed(Drain(), receiver=None),
        lambda: sealed(NodeHeartbeat(NODE, NodeLoad())),
        lambda: sealed(LaterDrain()),
        lambda: sealed(Drain())[:-3] + "AAA",
    ],
    ids=[
        "nothing",
        "empty",
        "not_base64",
        "no_frame",
        "too_long",
        "another_secret",
        "another_purpose",
        "no_receiver",
        "no_command",
        "an_unknown_field",
        "cut_off",
    ],
)
def test_anything_else_is_refused(make: Callable[[], str | None]) -> None:
    assert refusal(gate(), make()).status == 401


LOCAL, ELSEWHERE = "tcp://127.0.0.1:8100", "tcp://10.0.0.9:8100"


@pytest.mark.parametrize(
    ("started", "transfer", "proxies", "confined"),
    [
        (Role.PREFILL, TransferConfig(), (LOCAL, ELSEWHERE), True),
        (Role.PREFILL, TransferConfig(), ("tcp://proxy.example:8100",), True),
        (Role.PREFILL, TransferConfig(), (LOCAL, "tcp://[::1]:8100", "tcp://localhost:8100"), False),
        (Role.PREFILL, TransferConfig(host="0.0.0.0"), (ELSEWHERE,), False),
        (Role.PREFILL, TransferConfig(advertise="10.0.0.7"), (ELSEWHERE,), False),
        (Role.PREFILL, TransferConfig(ucx_net_devices="eth0"), (ELSEWHERE,), False),
        (Role.DECODE, TransferConfig(), (ELSEWHERE,), False),
        (Role.MIXED, TransferConfig(), (ELSEWHERE,), False),
    ],
)
def test_which_nodes_could_not_fetch_from_other_hosts(
    started: Role, transfer: TransferConfig, proxies: tuple[str, ...], confined: bool
) -> None:
    assert is_confined(started, transfer, DiscoveryConfig(proxies=proxies)) is confined


def test_a_confined_node_only_prefills() -> None:
    for role in Role:
        check_role(role, confined=False)
    check_role(Role.PREFILL, confined=True)
    for role in (Role.DECODE, Role.MIXED):
        with pytest.raises(InvalidRequest, match=f"as a {role.value} node it could not fetch .* --transfer-host"):
            check_role(role, confined=True)
