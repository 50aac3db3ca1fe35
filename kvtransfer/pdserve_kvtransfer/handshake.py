"""Whether two engines fit, settled once for each pair of boots and before any address is used."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from pdserve.errors import HandshakeRefused, PeerLost
from pdserve.wire.transfer import EngineSpec, Hello, Refused, Welcome
from pdserve_kvtransfer.head_map import head_map


def misfit(ours: EngineSpec, theirs: EngineSpec) -> HandshakeRefused | None:
    """The first field that differs, in the order of EngineSpec; the numbers of ranks may differ."""
    for field in EngineSpec.__struct_fields__:
        if field == "tp_size":
            continue
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return HandshakeRefused(field, str(mine), str(other))
    return None


def answer(hello: Hello, boot_id: bytes, spec: EngineSpec) -> Refused | None:
    """The prefill side's refusal of ``hello``; None if the engines fit."""
    refusal = misfit(spec, hello.spec)
    refusal = refusal or _bad_ranks(spec, hello.spec, hello.rank_addresses)
    return None if refusal is None else Refused(boot_id, refusal.field, refusal.ours, refusal.theirs)


def _bad_ranks(ours: EngineSpec, theirs: EngineSpec, addresses: Sequence[bytes]) -> HandshakeRefused | None:
    if len(addresses) != theirs.tp_size:
        return HandshakeRefused("rank_addresses", f"{theirs.tp_size} by tp_size", str(len(addresses)))
    try:
        head_map(ours.kv_heads, theirs.tp_size, ours.tp_size)
    except ValueError:
        return HandshakeRefused("tp_size", str(ours.tp_size), str(theirs.tp_size))
    return None


class Standing(enum.Enum):
    """Of a handshake, as the decode side sees it."""

    GREETING = "greeting"
    WELCOME = "welcome"


class Greeting:
    """The decode side of one handshake, with the boot that it means to meet."""

    def __init__(self, boot_id: bytes, spec: EngineSpec, target_boot: bytes) -> None:
        self._boot_id = boot_id
        self._spec = spec
        self._target_boot = target_boot
        self.standing = Standing.GREETING

    def hello(self, rank_addresses: Sequence[bytes]) -> Hello:
        return Hello(self._boot_id, self._spec, list(rank_addresses))

    def on_welcome(self, message: Welcome) -> tuple[bytes, ...] | None:
        """The other ranks' addresses, to be connected to; None if the handshake stands already.

        Raises HandshakeRefused if the engines do not fit, PeerLost if another process answers than was meant.
        """
        self.check_boot(message.boot_id)
        if self.standing is Standing.WELCOME:
            return None
        refusal = misfit(self._spec, message.spec)
        refusal = refusal or _bad_ranks(self._spec, message.spec, message.rank_addresses)
        if refusal is not None:
            raise refusal
        self.standing = Standing.WELCOME
        return tuple(message.rank_addresses)

    def refused(self, message: Refused) -> HandshakeRefused | PeerLost:
        """What a refusal means for this side."""
        if self.standing is Standing.WELCOME:
            return PeerLost("the prefill engine has given up the handshake")
        return HandshakeRefused(message.field, message.theirs, message.ours)

    def check_boot(self, boot_id: bytes) -> None:
        """Raises PeerLost unless ``boot_id`` is the one that was meant."""
        if boot_id != self._target_boot:
            raise PeerLost("the prefill node has restarted")
