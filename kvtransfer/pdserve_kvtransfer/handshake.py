"""Whether two engines fit, settled once for each pair of boots and before any address is used."""

from __future__ import annotations

import enum

from pdserve.errors import HandshakeRefused, PeerLost
from pdserve.wire.transfer import EngineSpec, Hello, Refused, Welcome


def misfit(ours: EngineSpec, theirs: EngineSpec) -> HandshakeRefused | None:
    """The first field that differs, in the order of EngineSpec."""
    for field in EngineSpec.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return HandshakeRefused(field, str(mine), str(other))
    return None


def answer(hello: Hello, boot_id: bytes, spec: EngineSpec) -> Refused | None:
    """The prefill side's refusal of ``hello``; None if the engines fit."""
    refusal = misfit(spec, hello.spec)
    if refusal is None and len(hello.rank_addresses) != spec.tp_size:
        refusal = HandshakeRefused("rank_addresses", str(spec.tp_size), str(len(hello.rank_addresses)))
    return None if refusal is None else Refused(boot_id, refusal.field, refusal.ours, refusal.theirs)


class Standing(enum.Enum):
    """Of a handshake, as the decode side sees it."""

    GREETING = "greeting"
    WELCOME = "welcome"


class Greeting:
    """The decode side of one handshake, with the boot that it means to meet."""

    def __init__(self, boot_id: bytes, spec: EngineSpec, address: bytes, target_boot: bytes) -> None:
        self._boot_id = boot_id
        self._spec = spec
        self._address = address
        self._target_boot = target_boot
        self.standing = Standing.GREETING

    def hello(self) -> Hello:
        return Hello(self._boot_id, self._spec, [self._address])

    def on_welcome(self, message: Welcome) -> bytes | None:
        """The other side's address, to be connected to; None if the handshake stands already.

        Raises HandshakeRefused if the engines do not fit, PeerLost if another process answers than was meant.
        """
        self.check_boot(message.boot_id)
        if self.standing is Standing.WELCOME:
            return None
        refusal = misfit(self._spec, message.spec)
        if refusal is None and len(message.rank_addresses) != self._spec.tp_size:
            refusal = HandshakeRefused("rank_addresses", str(self._spec.tp_size), str(len(message.rank_addresses)))
        if refusal is not None:
            raise refusal
        self.standing = Standing.WELCOME
        return message.rank_addresses[0]

    def refused(self, message: Refused) -> HandshakeRefused | PeerLost:
        """What a refusal means for this side."""
        if self.standing is Standing.WELCOME:
            return PeerLost("the prefill engine has given up the handshake")
        return HandshakeRefused(message.field, message.theirs, message.ours)

    def check_boot(self, boot_id: bytes) -> None:
        """Raises PeerLost unless ``boot_id`` is the one that was meant."""
        if boot_id != self._target_boot:
            raise PeerLost("the prefill node has restarted")
