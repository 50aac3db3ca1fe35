"""The handshake, which settles whether two engines fit. It happens once for each pair of boots, before any address is
used.

The protocol comes first: engines of two versions fit if there is a version of the protocol that both support.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.control.frame import Opened
from pdserve.errors import HandshakeRefused, PeerLost, StaleFrame
from pdserve.wire.cache_groups import GroupSpec, Keep
from pdserve.wire.transfer import EngineSpec, Hello, Pong, Refused, ToDecode, Welcome
from pdserve_kvtransfer.pieces import head_map

_NAMED, _NAMES_CHARS = 16, 200
"""So much is shown of another engine's groups."""

_MAY_DIFFER = ("protocol", "oldest_protocol", "tp_size", "groups")


def misfits(ours: EngineSpec, theirs: EngineSpec) -> Iterator[HandshakeRefused]:
    """Yields a refusal for each field that does not fit, in the order of EngineSpec and its groups."""
    if ours.spoken.common(theirs.spoken) is None:
        yield HandshakeRefused("protocol", str(ours.spoken), str(theirs.spoken))
    for field in EngineSpec.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if field not in _MAY_DIFFER and mine != other:
            yield HandshakeRefused(field, str(mine), str(other))
    yield from _group_misfits(ours.groups, theirs.groups)


def _group_misfits(ours: Sequence[GroupSpec], theirs: Sequence[GroupSpec]) -> Iterator[HandshakeRefused]:
    if [group.name for group in ours] != [group.name for group in theirs]:
        yield HandshakeRefused("cache groups", _names(ours), _names(theirs))
        return
    for mine, other in zip(ours, theirs, strict=True):
        for field in GroupSpec.__struct_fields__:
            here, there = getattr(mine, field), getattr(other, field)
            if here != there:
                yield HandshakeRefused(f"cache group {mine.name!r}: {field}", _shown(here), _shown(there))


def _names(groups: Sequence[GroupSpec]) -> str:
    text = ", ".join(group.name for group in groups[:_NAMED]) or "one"
    return text[:_NAMES_CHARS]


def _shown(value: object) -> str:
    return value.value if isinstance(value, Keep) else str(value)


def misfit(ours: EngineSpec, theirs: EngineSpec) -> HandshakeRefused | None:
    """Returns the refusal for the first field that does not fit, if there is one."""
    return next(misfits(ours, theirs), None)


def answer(hello: Hello, boot_id: bytes, spec: EngineSpec) -> Refused | None:
    """Returns the prefill side's refusal of ``hello``, or None if the engines fit."""
    refusal = misfit(spec, hello.spec)
    refusal = refusal or _bad_ranks(spec, hello.spec, hello.rank_addresses)
    return None if refusal is None else Refused(boot_id, refusal.field, refusal.ours, refusal.theirs)


def _bad_ranks(ours: EngineSpec, theirs: EngineSpec, addresses: Sequence[bytes]) -> HandshakeRefused | None:
    if len(addresses) != theirs.tp_size:
        return HandshakeRefused("rank_addresses", f"{theirs.tp_size} by tp_size", str(len(addresses)))
    for number, heads in enumerate(ours.group_heads):
        try:
            head_map(heads, theirs.tp_size, ours.tp_size)
        except ValueError:
            of_group = f"cache group {ours.groups[number].name!r}: " if ours.groups else ""
            return HandshakeRefused(f"{of_group}tp_size", str(ours.tp_size), str(theirs.tp_size))
    return None


class Handshake:
    """The decode side of one handshake, with the boot that it means to meet."""

    def __init__(self, boot_id: bytes, spec: EngineSpec, target_boot: bytes) -> None:
        self._boot_id = boot_id
        self._spec = spec
        self._target_boot = target_boot
        self.protocol: int | None = None
        """The version of the protocol that the engines agreed on; None before the ``Welcome``."""

    @property
    def complete(self) -> bool:
        """Whether the other engine has answered with a ``Welcome`` that fits."""
        return self.protocol is not None

    def hello(self, rank_addresses: Sequence[bytes]) -> Hello:
        return Hello(self._boot_id, self._spec, list(rank_addresses))

    def accepts(self, opened: Opened[ToDecode]) -> bool:
        """Returns whether a frame is from the engine that was meant, and names this one.

        Raises PeerLost if it shows that another process has taken that engine's place.
        """
        message = opened.message
        if opened.named and opened.sender != self._target_boot:
            if isinstance(message, Welcome | Refused | Pong) and message.boot_id == opened.sender:
                self.check_boot(message.boot_id)
            return False
        return opened.named

    def is_of_peer(self, frame: StaleFrame) -> bool:
        """Returns whether the engine that was meant has sent a frame."""
        return frame.sender == self._target_boot

    def on_welcome(self, message: Welcome) -> tuple[bytes, ...] | None:
        """Returns the addresses of the other engine's ranks, or None if the handshake was complete already.

        Raises HandshakeRefused if the engines do not fit, and PeerLost if another process answers than was meant.
        """
        self.check_boot(message.boot_id)
        if self.complete:
            return None
        refusal = misfit(self._spec, message.spec)
        refusal = refusal or _bad_ranks(self._spec, message.spec, message.rank_addresses)
        if refusal is not None:
            raise refusal

        self.protocol = self._spec.spoken.common(message.spec.spoken)
        return tuple(message.rank_addresses)

    def refused(self, message: Refused) -> HandshakeRefused | PeerLost:
        """Returns the error that a refusal means for this side."""
        if message.field == "boot_id":
            return PeerLost("the prefill node has restarted")
        if self.complete:
            return PeerLost("the prefill engine has given up the handshake")
        if message.field == "handshake":
            return PeerLost("the prefill engine knows of no handshake: it has dropped the greeting")
        return HandshakeRefused(message.field, message.theirs, message.ours)

    def check_boot(self, boot_id: bytes) -> None:
        """Raises PeerLost unless ``boot_id`` is the one that was meant."""
        if boot_id != self._target_boot:
            raise PeerLost("the prefill node has restarted")
