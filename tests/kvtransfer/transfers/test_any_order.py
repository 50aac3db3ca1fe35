"""Tests transfers between engines of several ranks, which fetch from each other, with reports, control frames, failures
and lies in any order.

The sides, sessions, ports and rank threads are real, and are driven step by step instead of by threads. Only control
sockets are replaced: by queues that a test can delay and cut, and which fail as sockets do when they are closed.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.control.connection_guard import RoutedMessage
from pdserve.control.frame import Purpose, Sealer
from pdserve.errors import PeerLost, TransferError
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.rank import RankCommand, RankReport
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import (
    UNKNOWN_LOAD,
    CachedRequest,
    Digests,
    Done,
    Failed,
    FailureCause,
    FirstToken,
    Held,
    Hello,
    Offer,
    Pong,
    PrefillRequest,
    Refused,
    ToDecode,
    ToPrefill,
    Welcome,
)
from pdserve_kvtransfer.configuration import side_settings
from pdserve_kvtransfer.control.sockets import ControlBatch
from pdserve_kvtransfer.events import (
    BlocksOffered,
    BlocksReleased,
    CachedFetchOrder,
    CachedWanted,
    EventQueue,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushWanted,
    TransferEvent,
    TransferStats,
)
from pdserve_kvtransfer.pieces import heads_of
from pdserve_kvtransfer.rank_thread import RankThread
from pdserve_kvtransfer.ranks import RankChannels, Reported
from pdserve_kvtransfer.region import KvRegion, Memory
from pdserve_kvtransfer.sides import (
    CancelFetch,
    FailPush,
    GiveFirstToken,
    GiveHeld,
    LocalEngine,
    OfferBlocks,
    PushBlocks,
)
from pdserve_kvtransfer.thread import BothSides
from tests.examples import examples
from tests.kvtransfer.inproc import Fabric, InprocLink, InprocTransport
from tests.kvtransfer.rig import CONFIG, SAMPLING, SECRET, SPEC

HEADS = 2
HEAD_BYTES = 8
BLOCKS = 96
A_PROMPT = 3
"""The blocks of a prompt."""
LEASE_S = CONFIG.lease_ms / 1000


# ---------------------------------------------------------------- the network


@dataclass
class Connection:
    """A connection between a client socket and a server, with the frames that are under way in both directions."""

    number: int
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    inbox: list[bytes] = field(default_factory=list)
    cut: bool = False
    closed: bool = False

    @property
    def route(self) -> bytes:
        return b"route %d" % self.number


class Server:
    """Stands in for ``ControlServer``."""

    def __init__(self, net: Net) -> None:
        self.address = f"inproc://{len(net.servers)}"
        self.sockets: list[Any] = []
        self.connections: dict[bytes, Connection] = {}
        self.inbox: list[RoutedMessage] = []
        self.ended: list[int] = []
        net.servers[self.address] = self

    def receive(self) -> ControlBatch:
        frames, ended = self.inbox, self.ended
        self.inbox, self.ended = [], []
        return ControlBatch(frames, False, ended, ended, blocked=False)

    def trust(self, connection: int) -> None:
        pass

    def next_check(self) -> None:
        return None

    def check(self, now: float) -> None:
        pass

    def send(self, route: bytes, frame: bytes) -> bool:
        connection = self.connections.get(route)
        if connection is not None and not connection.cut and not connection.closed:
            connection.down.append(frame)
        return True

    def close(self, linger_s: float) -> None:
        for connection in self.connections.values():
            connection.cut = True


class Client:
    """Stands in for ``ControlClient``."""

    def __init__(self, net: Net, control: str) -> None:
        self.sockets: list[Any] = []
        self._server = net.servers[control]
        self.connection = Connection(next(net.numbers))
        self._server.connections[self.connection.route] = self.connection
        net.connections.append((self.connection, self._server))

    def _check(self) -> None:
        if self.connection.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    def receive(self) -> tuple[list[bytes], bool]:
        self._check()
        batch, self.connection.inbox = self.connection.inbox, []
        return batch, False

    def send(self, frame: bytes) -> bool:
        self._check()
        self.connection.up.append(frame)
        return True

    def lost(self) -> str | None:
        self._check()
        return "cut" if self.connection.cut else None

    def close(self, linger_s: float) -> None:
        if not self.connection.closed:
            self.connection.closed = True
            self._server.ended.append(self.connection.number)


class Net:
    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self.connections: list[tuple[Connection, Server]] = []
        self.numbers = iter(range(1, 1_000_000))

    def deliver_up(self, pick: int) -> None:
        ready = [pair for pair in self.connections if pair[0].up and not pair[0].cut]
        if ready:
            connection, server = ready[pick % len(ready)]
            frame = connection.up.popleft()
            server.inbox.append(RoutedMessage(connection.route, frame, connection.number))

    def deliver_down(self, pick: int) -> None:
        ready = [connection for connection, _ in self.connections if connection.down and not connection.closed]
        if ready:
            connection = ready[pick % len(ready)]
            connection.inbox.append(connection.down.popleft())

    def cut(self, pick: int) -> None:
        if self.connections:
            connection, server = self.connections[pick % len(self.connections)]
            if not connection.cut and not connection.closed:
                connection.cut = True
                server.ended.append(connection.number)


# ---------------------------------------------------------------- engines


class Failure(enum.Enum):
    LOST = "a transport's error"
    DEFECT = "an exception of no kind that anybody expects"


def raised(failure: Failure) -> Exception:
    return PeerLost("the test says so") if failure is Failure.LOST else KeyError("the test says so")


class FailingLink(InprocLink):
    """A link whose next ``progress``, ``arrivals``, ``receive``, ``send`` or ``connect`` fails as the test says."""

    failing: Exception | None = None

    def fail(self, operation: int, failure: Failure) -> None:
        name = ("progress", "arrivals", "receive", "send", "connect", "arm", "sent")[operation % 7]

        def fails(*_: object, **__: object) -> Any:
            raise raised(failure)

        setattr(self, name, fails)


class FailingTransport(InprocTransport):
    """A transport that opens ``FailingLink``s, or fails to when the test says so."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self.fabric = fabric
        self.refuse: Failure | None = None

    def open_link(self, memory: Memory) -> InprocLink:
        if self.refuse is not None:
            failure, self.refuse = self.refuse, None
            raise TransferError("no link") if failure is Failure.LOST else raised(failure)
        assert isinstance(memory, memoryview)
        link = FailingLink(self.fabric, memory)
        self.links.append(link)
        return link


class SteppedRanks(RankChannels):
    """Stands in for the other ranks' threads, which take a step when the test lets them."""

    def __init__(self, threads: Sequence[RankThread], transports: Sequence[FailingTransport]) -> None:
        self.sockets = []
        self._queues: dict[int, deque[Reported]] = {}
        self._numbers = iter(range(1, 1_000_000))  # type: ignore[assignment]
        self.threads, self.transports = threads, transports
        self.commands: list[deque[RankCommand]] = [deque() for _ in threads]

    @property
    def ranks(self) -> int:
        return len(self.threads) + 1

    def send(self, command: RankCommand) -> None:
        for queue in self.commands:
            queue.append(command)

    def receive(self) -> bool:
        return False

    def close(self, linger_s: float) -> None:
        pass

    def work(self, pick: int) -> None:
        """Has one rank take its next command and poll its links."""
        if not self.threads:
            return
        index = pick % len(self.threads)
        thread, commands = self.threads[index], self.commands[index]
        if commands:
            command: Any = commands.popleft()
            thread._handle(command, self.transports[index])
        for port in list(thread._ports.values()):
            port.turn()
            port.arm()
        thread._collect_reports()

    def report(self, pick: int) -> None:
        """Brings one rank's next report to rank 0."""
        if not self.threads:
            return
        index = pick % len(self.threads)
        unsent = self.threads[index]._unsent
        if unsent:
            report: RankReport = msgspec.msgpack.decode(unsent.popleft(), type=RankReport)
            if (queue := self._queues.get(report.link)) is not None:
                queue.append(Reported(index + 1, report))


class Node:
    """One engine, and a model's view of it: who holds which block."""

    def __init__(self, ranks: int, net: Net, fabric: Fabric) -> None:
        self.boot_id = new_id()
        self.ranks = ranks
        spec = msgspec.structs.replace(SPEC, kv_heads=HEADS, tp_size=ranks)
        block_bytes = HEAD_BYTES * len(heads_of(0, ranks, HEADS))
        self.regions = [KvRegion(memoryview(bytearray(BLOCKS * block_bytes)), block_bytes) for _ in range(ranks)]
        self.transports = [FailingTransport(fabric) for _ in range(ranks)]
        threads = [
            RankThread(
                address="",
                rank=rank,
                ranks=ranks,
                heads=(HEADS,),
                region=self.regions[rank],
                transport=partial(InprocTransport, fabric),
                died=print,
            )
            for rank in range(1, ranks)
        ]
        self.stepped = SteppedRanks(threads, self.transports[1:])
        self.event_queue = EventQueue()
        self.sealer = Sealer(SECRET, Purpose.TRANSFER, self.boot_id)
        self.local = LocalEngine(
            boot_id=self.boot_id,
            secret=SECRET,
            spec=spec,
            region=self.regions[0],
            settings=side_settings(CONFIG),
            transport=self.transports[0],
            zmq_context=net,  # type: ignore[arg-type]
            sealer=self.sealer,
            ranks=self.stepped,
            event_queue=self.event_queue,
            stats=TransferStats(),
            load=lambda: UNKNOWN_LOAD,
            max_prompt_tokens=0,
            reports_sent=False,
        )
        self.side = BothSides(self.local)
        self.next_block = 0

    def take_blocks(self, count: int) -> tuple[int, ...] | None:
        """Returns blocks that were never used before, or None if there are too few."""
        if self.next_block + count > BLOCKS:
            return None
        first, self.next_block = self.next_block, self.next_block + count
        return tuple(range(first, self.next_block))

    def write(self, block: int, content: int) -> None:
        for region in self.regions:
            region.block(block)[:] = bytes([content]) * region.block_bytes

    def holds(self, block: int, content: int) -> bool:
        return all(bytes(region.block(block)) == bytes([content]) * region.block_bytes for region in self.regions)

    def close(self) -> None:
        for transport in self.transports:
            for link in transport.links:
                InprocLink.close(link)
        for thread in self.stepped.threads:
            thread.close(1.0)


@dataclass
class Asked:
    """A fetch as its decode engine sees it."""

    order: FetchOrder | CachedFetchOrder
    content: int
    ended: bool = False
    quarantined: set[int] = field(default_factory=set)


@dataclass
class Pushed:
    """A push as its prefill engine sees it."""

    wanted: PushWanted | CachedWanted
    has: int = A_PROMPT
    """How many of the wanted blocks this engine has, or can compute."""
    blocks: list[int] = field(default_factory=list)
    told: bool = False
    ended: bool = False


HASHES = tuple(bytes([at]) * 32 for at in range(A_PROMPT))
FALSE_HASHES = (b"?" * 32,)
"""The hashes of an offer that names another engine than its sender."""
FREE = 0xFF
"""The byte that fills the blocks that no request holds."""


class World:
    """Two nodes of one shape and two of another. Each fetches from both of the other shape."""

    def __init__(self, ranks: int, other_ranks: int) -> None:
        self.now = 1000.0
        self.net = Net()
        self.fabric = Fabric()
        self.nodes = [Node(count, self.net, self.fabric) for count in (ranks, ranks, other_ranks, other_ranks)]
        self.asked: dict[TransferId, Asked] = {}
        self.pushed: dict[TransferId, Pushed] = {}
        self.free: list[tuple[Node, int]] = []
        self.held: set[int] = set()
        """How many blocks the fetches of cached blocks that landed have brought."""
        self.offers_heard = 0

    def pair(self, pick: int) -> tuple[Node, Node]:
        """Returns a node that fetches, and one that it fetches from."""
        sides = self.nodes[:2], self.nodes[2:]
        return sides[pick // 4 % 2][pick % 2], sides[1 - pick // 4 % 2][pick // 2 % 2]

    def boot(self, boot_id: bytes) -> Node:
        return next(node for node in self.nodes if node.boot_id == boot_id)

    # ------------------------------------------------------------ requests of the engines

    def fetch(self, pick: int) -> None:
        decode, prefill = self.pair(pick)
        blocks = decode.take_blocks(A_PROMPT)
        if blocks is None:
            return
        order = FetchOrder(
            transfer_id=TransferId(new_id(), 0, decode.boot_id),
            target=self.target(prefill),
            token_ids=list(range(A_PROMPT * SPEC.block_size)),
            first_block=0,
            block_ids=blocks,
            sampling=SAMPLING,
            deadline_s=20 * LEASE_S,
        )
        self.ask(decode, order)

    def fetch_cached(self, pick: int) -> None:
        asker, holder = self.pair(pick)
        blocks = asker.take_blocks(A_PROMPT)
        if blocks is not None:
            transfer, target = TransferId(new_id(), 0, asker.boot_id), self.target(holder)
            self.ask(asker, CachedFetchOrder(transfer, target, HASHES, blocks, 20 * LEASE_S))

    def target(self, node: Node) -> PrefillTarget:
        return PrefillTarget("p", node.side.address, node.boot_id)

    def offer(self, pick: int) -> None:
        holder, other = self.pair(pick)
        holder.side.handle(OfferBlocks(self.target(other), HASHES, f"r{pick % 7}"), self.now)

    def ask(self, decode: Node, order: FetchOrder | CachedFetchOrder) -> None:
        self.asked[order.transfer_id] = Asked(order, 1 + len(self.asked) % 200)
        decode.event_queue.open(order.transfer_id)
        decode.side.handle(order, self.now)

    def cancel(self, pick: int) -> None:
        alive = [asked for asked in self.asked.values() if not asked.ended]
        if alive:
            transfer = alive[pick % len(alive)].order.transfer_id
            decode = self.decode_of(transfer)
            if decode.event_queue.cancel(transfer):
                decode.side.handle(CancelFetch(transfer), self.now)

    def decode_of(self, transfer: TransferId) -> Node:
        return self.boot(transfer.decode_boot)

    def push(self, pick: int) -> None:
        """Pushes the next block of a push, and after the last one its answer. Later calls repeat the answer."""
        if not self.pushed:
            return
        transfer, pushed = list(self.pushed.items())[pick % len(self.pushed)]
        prefill = self.prefill_of(transfer)
        at = len(pushed.blocks)
        if at == pushed.has:
            held = isinstance(pushed.wanted, CachedWanted)
            token = GiveFirstToken(transfer, (SampledToken(1),), 0, UNKNOWN_LOAD)
            prefill.side.handle(GiveHeld(transfer, at) if held else token, self.now)
            return
        blocks = prefill.take_blocks(1)
        if blocks is None or pushed.ended:
            return
        prefill.write(blocks[0], self.asked[transfer].content + at)
        pushed.blocks += blocks
        prefill.side.handle(PushBlocks(transfer, at, blocks), self.now)

    def fail_push(self, pick: int) -> None:
        if self.pushed:
            transfer = list(self.pushed)[pick % len(self.pushed)]
            self.prefill_of(transfer).side.handle(FailPush(transfer, "no", FailureCause.NODE), self.now)

    def prefill_of(self, transfer: TransferId) -> Node:
        return self.boot(self.asked[transfer].order.target.boot_id)

    # ------------------------------------------------------------ ordinary events

    def turn(self, pick: int) -> None:
        node = self.nodes[pick % 4]
        node.side.turn(self.now)
        node.side.tick(self.now)
        node.side.next_timer()
        node.side.arm()
        self.look(node)

    def work(self, pick: int) -> None:
        self.nodes[pick % 4].stepped.work(pick // 4)

    def report(self, pick: int) -> None:
        self.nodes[pick % 4].stepped.report(pick // 4)

    def wait(self, pick: int) -> None:
        self.now += (0.01, 0.1, LEASE_S * 1.5)[pick % 3]

    def hold(self, _: int) -> None:
        self.fabric.hold()

    def release(self, _: int) -> None:
        self.fabric.release()

    # ------------------------------------------------------------ faults

    def links(self) -> list[InprocLink]:
        return [link for node in self.nodes for transport in node.transports for link in transport.links if link._open]

    def sever(self, pick: int) -> None:
        if links := self.links():
            links[pick % len(links)].sever()

    def fail_link(self, pick: int) -> None:
        if links := self.links():
            link = links[pick % len(links)]
            assert isinstance(link, FailingLink)
            link.fail(pick // 3, list(Failure)[pick % 2])

    def refuse_links(self, pick: int) -> None:
        node = self.nodes[pick % 4]
        node.transports[pick // 4 % node.ranks].refuse = list(Failure)[pick % 2]

    def lie_to_decode(self, pick: int) -> None:
        """Lets a prefill engine with the secret send a message that it should not."""
        open_ones = [(c, s) for c, s in self.net.connections if not c.closed and not c.cut]
        if not open_ones:
            return
        connection, server = open_ones[pick % len(open_ones)]
        prefill = next(node for node in self.nodes if node.side.address == server.address)
        transfers = list(self.asked) or [TransferId(new_id(), 0, new_id())]
        transfer = transfers[pick % len(transfers)]
        spec = prefill.local.spec
        lies: list[ToDecode] = [
            Refused(prefill.boot_id, "handshake", "none", "assumed"),
            Refused(prefill.boot_id, "dtype", "a", "b"),
            Welcome(prefill.boot_id, spec, [b"nowhere"] * prefill.ranks),
            Welcome(prefill.boot_id, spec, []),
            Welcome(new_id(), spec, [b""] * prefill.ranks),
            Welcome(prefill.boot_id, msgspec.structs.replace(spec, tp_size=0), []),
            Failed(transfer, "no"),
            Held(transfer, pick % 5),
            Digests(transfer, 0, 0, pick % 5, (1, 2)),
            Digests(transfer, 2**60, 2**60, 2**60, (1,)),
            FirstToken(transfer, (SampledToken(7),), -5),
            Pong(new_id()),
        ]
        # One of the engines has this connection. Frames for the other ones name a wrong receiver.
        decode = self.nodes[pick // 3 % 4]
        connection.inbox.append(prefill.sealer.seal(lies[pick // 7 % len(lies)], decode.boot_id))

    def lie_to_prefill(self, pick: int) -> None:
        decode, prefill = self.pair(pick)
        server = self.net.servers[prefill.side.address]
        transfers = list(self.asked) or [TransferId(new_id(), 0, decode.boot_id)]
        transfer = transfers[pick % len(transfers)]
        spec = decode.local.spec
        request = PrefillRequest(
            transfer_id=transfer,
            tag=1 + pick,
            token_ids=[1],
            first_block=pick % 3,
            sampling=SAMPLING,
            deadline_s=float("inf"),
        )
        lies: list[ToPrefill] = [
            Hello(decode.boot_id, spec, [b"nowhere"] * decode.ranks),
            Hello(decode.boot_id, msgspec.structs.replace(spec, tp_size=0), []),
            Hello(decode.boot_id, spec, []),
            Done(transfer),
            request,
            CachedRequest(transfer_id=transfer, tag=1 + pick, hashes=HASHES[: 1 + pick % 3], deadline_s=1e300),
            Offer(self.target(self.nodes[pick % 4]), FALSE_HASHES if self.nodes[pick % 4] is not decode else HASHES),
        ]
        connection = self.net.connections[-1][0] if self.net.connections else Connection(0)
        lie = lies[pick // 5 % len(lies)]
        frame = decode.sealer.seal(lie, None if isinstance(lie, Hello) else prefill.boot_id)
        server.inbox.append(RoutedMessage(connection.route, frame, connection.number))

    # ------------------------------------------------------------ events for the engines

    def look(self, node: Node) -> None:
        for event in node.event_queue.drain():
            self.hear(node, event)

    def hear(self, node: Node, event: TransferEvent) -> None:
        match event:
            case FetchLanded(transfer):
                asked = self.asked[transfer]
                cached = isinstance(asked.order, CachedFetchOrder)
                assert event.landed == A_PROMPT or (cached and event.landed < A_PROMPT)
                if cached:
                    self.held.add(event.landed)
                landed = asked.order.block_ids[: event.landed]
                assert all(node.holds(block, asked.content + at) for at, block in enumerate(landed)), (
                    "it landed, and is not what was pushed"
                )
                self.fetch_ended(node, asked, ())
            case FetchFailed(transfer, quarantined=quarantined) | FetchCancelled(transfer, quarantined):
                self.fetch_ended(node, self.asked[transfer], quarantined)
            case BlocksReleased(blocks):
                for block in blocks:
                    asked = next(a for a in self.asked.values() if block in a.quarantined and self.on(node, a))
                    asked.quarantined.remove(block)
                    self.give_back(node, block)
            case BlocksOffered(holder, hashes):
                assert holder.control == self.boot(holder.boot_id).side.address
                assert hashes == HASHES, "an engine offers what another one has"
                self.offers_heard += 1
            case PushWanted(transfer) | CachedWanted(transfer):
                ours = transfer in self.asked and self.prefill_of(transfer) is node
                known = self.pushed.get(transfer) if ours else None
                # A request in a lie may come after the end of the real one.
                assert known is None or known.ended, "it is wanted twice"
                if ours and known is None:
                    cached = isinstance(event, CachedWanted)
                    self.pushed[transfer] = Pushed(event, self.asked[transfer].content % 4 if cached else A_PROMPT)
                else:
                    node.side.handle(FailPush(transfer, "a lie", FailureCause.PROMPT), self.now)
            case PushEnded(transfer):
                pushed = self.pushed.get(transfer)
                if pushed is not None and self.prefill_of(transfer) is node and not pushed.ended:
                    pushed.ended = True
                    for block in pushed.blocks:
                        self.give_back(node, block)
            case FirstTokenArrived() | PushCancelled():
                pass
            case _:
                raise AssertionError(f"unexpected: {event}")

    def on(self, node: Node, asked: Asked) -> bool:
        return self.decode_of(asked.order.transfer_id) is node

    def fetch_ended(self, node: Node, asked: Asked, quarantined: tuple[int, ...]) -> None:
        assert not asked.ended, "it ended twice"
        assert set(quarantined) <= set(asked.order.block_ids)
        asked.ended = True
        asked.quarantined = set(quarantined)
        for block in asked.order.block_ids:
            if block not in asked.quarantined:
                self.give_back(node, block)

    def give_back(self, node: Node, block: int) -> None:
        node.write(block, FREE)
        self.free.append((node, block))

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        """Lets nothing more go wrong, and gives every engine the time to notice what did."""
        self.fabric.release()
        for node in self.nodes:
            for transport in node.transports:
                transport.refuse = None
        for round_number in range(60):
            for pick in range(12):
                self.net.deliver_up(pick)
                self.net.deliver_down(pick)
                self.work(pick)
                self.report(pick)
            for pick in range(4):
                self.turn(pick)
            if round_number % 5 == 4:
                self.now += LEASE_S

    def check(self) -> None:
        for asked in self.asked.values():
            assert asked.ended, f"{asked.order.transfer_id} never ended"
            assert not asked.quarantined, "blocks are quarantined for ever"
        assert all(pushed.ended for pushed in self.pushed.values())
        for node, block in self.free:
            assert node.holds(block, FREE), "a block was written to after it was given back"

    def close(self) -> None:
        for node in self.nodes:
            node.close()


USUAL = (
    World.fetch,
    World.fetch_cached,
    World.offer,
    World.push,
    World.push,
    World.turn,
    World.turn,
    World.turn,
    World.work,
    World.work,
    World.report,
    World.report,
)
EVERYTHING = (
    *USUAL,
    World.cancel,
    World.fail_push,
    World.wait,
    World.hold,
    World.release,
    World.sever,
    World.fail_link,
    World.refuse_links,
    World.lie_to_decode,
    World.lie_to_prefill,
)


@contextmanager
def world(ranks: int, other_ranks: int, patch: pytest.MonkeyPatch) -> Iterator[World]:
    patch.setattr("pdserve_kvtransfer.push.side.ControlServer", lambda net, *_: Server(net))
    patch.setattr("pdserve_kvtransfer.fetch.peer.ControlClient", Client)
    made = World(ranks, other_ranks)
    try:
        yield made
    finally:
        made.close()


def up(made: World, pick: int) -> None:
    made.net.deliver_up(pick)


def down(made: World, pick: int) -> None:
    made.net.deliver_down(pick)


def cut(made: World, pick: int) -> None:
    made.net.cut(pick)


def anything(made: World, pick: int) -> None:
    harms = [cut, *EVERYTHING[len(USUAL) :]]
    harms[pick % len(harms)](made, pick)


Step = tuple[Callable[[World, int], None], int]
steps = st.lists(
    st.tuples(st.sampled_from([*EVERYTHING, up, up, up, down, down, down, cut]), st.integers(0, 999)), max_size=250
)
RANKS = [(1, 1), (2, 2), (1, 2)]


@pytest.mark.parametrize(("ranks", "other_ranks"), RANKS)
def test_every_transfer_ends_once_and_every_block_is_free_again(ranks: int, other_ranks: int) -> None:
    @settings(max_examples=examples(60))
    @given(steps)
    def run(taken: list[Step]) -> None:
        with pytest.MonkeyPatch.context() as patch, world(ranks, other_ranks, patch) as made:
            for act, pick in taken:
                act(made, pick)
            made.settle()
            made.check()

    run()


@pytest.mark.parametrize(("ranks", "other_ranks"), RANKS)
@pytest.mark.parametrize("harm", [None, cut, World.sever, World.fail_link, World.lie_to_decode, World.wait, anything])
def test_long_runs_in_which_little_goes_wrong(
    ranks: int, other_ranks: int, harm: Callable[[World, int], None] | None
) -> None:
    """The runs are seeded. Many transfers get far before something happens."""
    source = random.Random(f"{ranks} {other_ranks} {getattr(harm, '__name__', harm)}")
    landed = offers_heard = 0
    held: set[int] = set()
    for _ in range(4):
        with pytest.MonkeyPatch.context() as patch, world(ranks, other_ranks, patch) as made:
            for number in range(1_500):
                act: Callable[[World, int], None] = source.choice([*USUAL, up, up, down, down])
                if act not in (World.fetch, World.fetch_cached) or number % 5 == 0:
                    act(made, source.randrange(1_000))
                if harm is not None and source.random() < 0.01:
                    harm(made, source.randrange(1_000))
            made.settle()
            made.check()
            landed += sum(node.local.stats.transfers_received for node in made.nodes)
            offers_heard += made.offers_heard
            held |= made.held
    assert landed > (0 if harm else 20)
    assert harm or (offers_heard > 20 and held == set(range(A_PROMPT + 1)))
