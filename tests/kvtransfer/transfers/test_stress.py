"""Tests hundreds of transfers of prompts and cached blocks at once: some are cancelled, refused, disturbed, or lost
with a node that restarts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from pdserve.config import TransferConfig
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import SampledToken
from pdserve_kvtransfer.events import (
    BlocksReleased,
    CachedFetchOrder,
    CachedWanted,
    FetchCancelled,
    FetchEnd,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushWanted,
)
from pdserve_kvtransfer.transport import Transport
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from tests.eventually import eventually
from tests.kvtransfer.faulty import Fault, Injector, faulty
from tests.kvtransfer.inproc import Fabric, InprocTransport
from tests.kvtransfer.rig import Engine, Pair, compiled_poster
from tests.kvtransfer.test_thread import open_files, transfer_threads

pytestmark = pytest.mark.integration

TRANSFERS = 600
AFTER_THE_RESTART = 100
WORKED_ON = 40
ATTEMPTS = 8
BLOCKS = 3
SOURCES = 50
BLOCK_BYTES = 12 * 1024
CONFIG = TransferConfig(heartbeat_ms=100, lease_ms=5_000)
PATIENCE_S = 60.0


@dataclass
class Server:
    """An engine that pushes what it is asked for in small parts, and sometimes refuses."""

    engine: Engine
    dice: random.Random
    wanted: list[PushWanted | CachedWanted] = field(default_factory=list)
    counts: Counter[type] = field(default_factory=Counter)
    over: set[TransferId] = field(default_factory=set)
    pushed: dict[TransferId, int] = field(default_factory=dict)

    def look(self) -> None:
        """Handles the events that have come."""
        self.engine.poll()
        while not self.engine.quiet():
            event = self.engine.take()
            self.counts[type(event)] += 1
            match event:
                case PushWanted() | CachedWanted():
                    self.wanted.append(event)
                case PushCancelled(transfer) | PushEnded(transfer):
                    self.over.add(transfer)

    def go_on(self) -> None:
        """Pushes further blocks of the oldest transfers, with the answer after the last block. Refuses some."""
        going, self.wanted = self.wanted[:WORKED_ON], self.wanted[WORKED_ON:]
        left = []
        for wanted in going:
            transfer, index = wanted.transfer_id, self.pushed.get(wanted.transfer_id, 0)
            if transfer in self.over:
                continue
            if self.dice.random() < 0.02:
                self.engine.thread.fail_push(transfer, "not this one")
                continue
            number, total = asked_for(wanted)
            count = self.dice.randint(0, total - index)
            blocks = tuple(source(number, i) for i in range(index, index + count))
            self.engine.thread.push(transfer, index, blocks)
            self.pushed[transfer] = index + count
            if index + count < total:
                left.append(wanted)
            elif isinstance(wanted, CachedWanted):
                self.engine.thread.held(transfer, total)
            else:
                self.engine.thread.first_token(transfer, (SampledToken(7),), 0)
        self.wanted = left + self.wanted

    @property
    def settled(self) -> bool:
        return self.counts[PushWanted] + self.counts[CachedWanted] == self.counts[PushEnded]


def asked_for(wanted: PushWanted | CachedWanted) -> tuple[int, int]:
    """Returns the number of a transfer, and how many of its blocks there are here."""
    if isinstance(wanted, PushWanted):
        return wanted.token_ids[0], BLOCKS
    number = int.from_bytes(wanted.hashes[0])
    return number, held_blocks(number)


def held_blocks(number: int) -> int:
    """Returns how many blocks of a transfer are cached: each third one is of cached blocks, of which some are there."""
    return number % (BLOCKS + 1) if number % 3 == 0 else BLOCKS


def source(number: int, index: int) -> int:
    """Returns which block of a prefill engine is block ``index`` of transfer ``number``."""
    return (number * 7 + index) % SOURCES


class Client:
    """A decode engine, with the transfers that it has ordered and their ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.numbers: dict[TransferId, int] = {}
        self.ends: dict[TransferId, FetchEnd] = {}
        self.quarantined: set[int] = set()
        self.attempts: Counter[int] = Counter()
        self.lost: list[int] = []

    def order(self, number: int, server: Server) -> None:
        made = Pair(server.engine, self.engine).order(self.places(number), deadline_s=PATIENCE_S)
        self.numbers[made.transfer_id] = number
        self.attempts[number] += 1
        if number % 3:
            self.engine.thread.fetch(replace(made, token_ids=[number, *made.token_ids[1:]]))
            return
        hashes = (number.to_bytes(32),) * BLOCKS
        cached = CachedFetchOrder(made.transfer_id, made.target, hashes, made.block_ids, PATIENCE_S)
        self.engine.thread.fetch(cached)

    def retry(self, server: Server) -> None:
        """Orders lost transfers again, unless their blocks may still be written to."""
        again, self.lost = self.lost, []
        for number in again:
            if self.attempts[number] < ATTEMPTS and not self.quarantined.intersection(self.places(number)):
                self.order(number, server)

    def cancel(self, transfers: list[TransferId]) -> None:
        for transfer in transfers:
            self.engine.thread.cancel_fetch(transfer)

    def places(self, number: int) -> tuple[int, ...]:
        return tuple(range(number * BLOCKS, (number + 1) * BLOCKS))

    def look(self) -> None:
        self.engine.poll()
        while not self.engine.quiet():
            match self.engine.take():
                case FetchLanded() | FetchFailed() | FetchCancelled() as end:
                    assert end.transfer_id not in self.ends, "a transfer ends once"
                    self.ends[end.transfer_id] = end
                    if isinstance(end, FetchLanded):
                        assert end.landed == held_blocks(self.numbers[end.transfer_id])
                    self.quarantined.update(end.quarantined)
                    if isinstance(end, FetchFailed):
                        self.lost.append(self.numbers[end.transfer_id])
                case BlocksReleased(block_ids):
                    self.quarantined.difference_update(block_ids)
                case FirstTokenArrived(transfer):
                    assert transfer not in self.ends

    @property
    def alive(self) -> int:
        return len(self.numbers) - len(self.ends)

    @property
    def settled(self) -> bool:
        return not self.alive and not self.quarantined


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Checks that no thread and no descriptor is left."""
    Engine(block_bytes=BLOCK_BYTES).close()  # Now everything is open that libraries open only once.
    before = open_files()
    yield
    assert not transfer_threads()
    # UCX's own thread may stay after a worker was destroyed by force, with five files in all.
    eventually(lambda: open_files() <= before + 5)


def transports(kind: str) -> tuple[Callable[[], Transport], Injector | None]:
    if kind == "inproc":
        fabric = Fabric()
        return lambda: InprocTransport(fabric), None
    if kind == "python":
        return lambda: UcxTransport(""), None
    compiled = partial(UcxTransport, "", make_poster=compiled_poster())
    if kind in ("mapped", "compiled"):
        return compiled, None
    injector = Injector(Fault[kind], every=509)
    return faulty(compiled, injector), injector


@pytest.mark.parametrize("kind", ["inproc", "mapped", "compiled", "python", "CORRUPT", "REORDER", "SEND_FAILS"])
def test_whatever_happens_to_hundreds_of_transfers(
    kind: str, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "shares", kind != "compiled")
    dice = random.Random(kind)
    make, injector = transports(kind)
    with ExitStack() as stack:

        def engine(blocks: int, config: TransferConfig = CONFIG) -> Engine:
            made = Engine(num_blocks=blocks, block_bytes=BLOCK_BYTES, config=config, transport=make)
            stack.callback(made.close)
            return made

        client = Client(engine((TRANSFERS + AFTER_THE_RESTART) * BLOCKS))
        servers = [Server(engine(SOURCES), dice) for _ in range(2)]
        content = servers[0].engine.fill(*range(SOURCES))
        servers[1].engine.fill_with(content)

        def look() -> bool:
            client.look()
            for server in servers:
                server.look()
            return True

        for number in range(TRANSFERS):
            client.order(number, dice.choice(servers))
        # Nothing has been pushed yet, so this number of transfers is alive on both sides.
        eventually(lambda: look() and sum(len(server.wanted) for server in servers) == TRANSFERS, timeout_s=PATIENCE_S)
        client.cancel(dice.sample(list(client.numbers), 40))

        def turn() -> bool:
            look()
            for server in servers:
                server.go_on()
            client.retry(dice.choice(servers))
            client.cancel(dice.sample(list(client.numbers), 2))
            return client.settled and all(server.settled for server in servers)

        eventually(lambda: turn() or len(client.ends) > TRANSFERS // 4, timeout_s=PATIENCE_S)
        # In the middle of all that, a node is replaced by its next boot at the same address.
        former = servers[1]
        former.engine.close()
        former.look()
        assert former.settled
        port = int(former.engine.address.rpartition(":")[2])
        servers[1] = Server(engine(SOURCES, replace(CONFIG, port=port)), dice)
        servers[1].engine.fill_with(content)
        for number in range(TRANSFERS, TRANSFERS + AFTER_THE_RESTART):
            client.order(number, servers[1])
        eventually(turn, timeout_s=PATIENCE_S)

        landed = {client.numbers[transfer] for transfer, end in client.ends.items() if isinstance(end, FetchLanded)}
        for number in landed:
            count = held_blocks(number)
            sent = b"".join(servers[0].engine.read(source(number, index)) for index in range(count))
            assert client.engine.read(*client.places(number)[:count]) == sent
        assert len(landed) > TRANSFERS // 4
        assert max(landed) >= TRANSFERS, "the new boot is used"
        assert injector is None or injector.injected > 0
        assert client.engine.thread.stats().quarantined_blocks == 0
