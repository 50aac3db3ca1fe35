"""Tests engines that fetch from each other at the same time, over real UCX and ZMQ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve_kvtransfer.events import (
    BlocksOffered,
    CachedFetchOrder,
    CachedWanted,
    FailureKind,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushOutcome,
    PushWanted,
    TransferEvent,
)
from tests.eventually import eventually
from tests.kvtransfer.rig import CONFIG, SAMPLING, SPEC, Engine, engine
from tests.kvtransfer.test_ranks import nodes

TRANSFERS = 20
SOURCES = (0, 1, 2)
HASHES = tuple(bytes([block]) * 32 for block in SOURCES)


class TwoWay:
    """An engine that answers every order from its first blocks, and counts what has ended."""

    def __init__(self, of: Engine) -> None:
        self.engine = of
        self.landed: list[TransferId] = []
        self.brought: dict[TransferId, int] = {}
        """How many blocks each transfer that landed has brought."""
        self.offered: list[BlocksOffered] = []
        self.failed: list[FetchFailed] = []
        self.pushed: list[PushEnded] = []
        self.wanted: list[PushWanted] = []
        self.answers = True

    def order(self, other: TwoWay, block_ids: tuple[int, ...]) -> FetchOrder:
        made = FetchOrder(
            transfer_id=TransferId(new_id(), 0, self.engine.boot_id),
            target=other.target,
            token_ids=list(range(len(block_ids) * SPEC.block_size)),
            first_block=0,
            block_ids=block_ids,
            sampling=SAMPLING,
            deadline_s=30.0,
        )
        self.engine.thread.fetch(made)
        return made

    def order_cached(self, other: TwoWay, block_ids: tuple[int, ...]) -> CachedFetchOrder:
        made = CachedFetchOrder(TransferId(new_id(), 0, self.engine.boot_id), other.target, HASHES, block_ids, 30.0)
        self.engine.thread.fetch(made)
        return made

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget("other", self.engine.address, self.engine.boot_id)

    def look(self) -> None:
        seen = len(self.engine.seen)
        self.engine.poll()
        for event in self.engine.seen[seen:]:
            self._on_event(event)

    def _on_event(self, event: TransferEvent) -> None:
        match event:
            case PushWanted(transfer):
                self.wanted.append(event)
                if self.answers:
                    self.engine.thread.push(transfer, 0, SOURCES)
                    self.engine.thread.first_token(transfer, (SampledToken(1),), 0)
            case CachedWanted(transfer, hashes):
                assert hashes == HASHES
                count = transfer.request[0] % (len(SOURCES) + 1)
                if count:
                    self.engine.thread.push(transfer, 0, SOURCES[:count])
                self.engine.thread.held(transfer, count)
            case BlocksOffered():
                self.offered.append(event)
            case FetchLanded(transfer, landed=count):
                self.landed.append(transfer)
                self.brought[transfer] = count
            case FetchFailed():
                self.failed.append(event)
            case PushEnded():
                self.pushed.append(event)
            case FirstTokenArrived() | PushCancelled():
                pass
            case _:
                raise AssertionError(f"unexpected: {event}")


def until(done: Callable[[], bool], *ends: TwoWay) -> None:
    def turn() -> bool:
        for end in ends:
            end.look()
        return done()

    eventually(turn)


def places(number: int) -> tuple[int, ...]:
    return tuple(len(SOURCES) * (number + 1) + at for at in range(len(SOURCES)))


def test_prompts_cached_blocks_and_offers_pass_in_both_directions_at_once(mapped_or_not: bool) -> None:
    size = len(SOURCES) * (TRANSFERS + 1)
    with engine(num_blocks=size) as one, engine(num_blocks=size) as other:
        ends = TwoWay(one), TwoWay(other)
        contents = [end.engine.fill(*SOURCES) for end in ends]
        asked: list[dict[TransferId, int]] = [{}, {}]
        for number in range(TRANSFERS):
            for i, end in enumerate(ends):
                ask = end.order if number % 3 == i else end.order_cached
                asked[i][ask(ends[1 - i], places(number)).transfer_id] = number
                end.engine.thread.offer(ends[1 - i].target, HASHES, f"r{number}")
        until(lambda: all(len(end.landed) == len(end.pushed) == TRANSFERS for end in ends), *ends)
        for i, end in enumerate(ends):
            for transfer, number in asked[i].items():
                cached = number % 3 != i
                count = end.brought[transfer]
                assert count == (transfer.request[0] % (len(SOURCES) + 1) if cached else len(SOURCES))
                sent = contents[1 - i][: count * end.engine.block_bytes]
                assert end.engine.read(*places(number)[:count]) == sent
            assert end.engine.read(*SOURCES) == contents[i], "a fetch does not touch the blocks that are pushed"
            assert {ended.outcome for ended in end.pushed} == {PushOutcome.DONE}
            assert end.offered and {offered.holder.boot_id for offered in end.offered} == {ends[1 - i].engine.boot_id}
            assert end.engine.thread.stats().handshakes == 2, "each direction has one handshake"


def test_two_engines_fetch_from_each_other(mapped_or_not: bool) -> None:
    size = len(SOURCES) * (TRANSFERS + 1)
    with engine(num_blocks=size) as one, engine(num_blocks=size) as other:
        ends = TwoWay(one), TwoWay(other)
        contents = [end.engine.fill(*SOURCES) for end in ends]
        for number in range(TRANSFERS):
            ends[0].order(ends[1], places(number))
            ends[1].order(ends[0], places(number))
        until(lambda: all(len(end.landed) == len(end.pushed) == TRANSFERS for end in ends), *ends)
        for i, end in enumerate(ends):
            assert all(end.engine.read(*places(number)) == contents[1 - i] for number in range(TRANSFERS))
            assert end.engine.read(*SOURCES) == contents[i], "a fetch does not touch the blocks that are pushed"
            assert {ended.outcome for ended in end.pushed} == {PushOutcome.DONE}
            stats = end.engine.thread.stats()
            assert (stats.transfers_sent, stats.transfers_received) == (TRANSFERS, TRANSFERS)
            assert stats.handshakes == 2, "each direction has one handshake"


@pytest.mark.parametrize(("ranks", "other_ranks"), [(2, 1), (1, 2)])
def test_nodes_of_unequal_ranks_fetch_from_each_other(ranks: int, other_ranks: int, tmp_path: Path) -> None:
    """The second of three transfers in each direction is of cached blocks."""
    with nodes(ranks, other_ranks, 4, tmp_path) as both:
        pair = both.prefill, both.decode
        ends = [TwoWay(node.engine) for node in pair]
        contents = [[node.fill(block) for block in SOURCES] for node in pair]
        asked: list[list[TransferId]] = [[], []]
        for number in range(3):
            for i, end in enumerate(ends):
                ask = end.order_cached if number == 1 else end.order
                asked[i].append(ask(ends[1 - i], places(number)).transfer_id)
        until(lambda: all(len(end.landed) == len(end.pushed) == 3 for end in ends), *ends)
        for i, (node, end) in enumerate(zip(pair, ends, strict=True)):
            for number, transfer in enumerate(asked[i]):
                for block, content in zip(places(number)[: end.brought[transfer]], contents[1 - i], strict=False):
                    assert node.holds(block, content)


def test_a_peer_that_dies_ends_the_transfers_in_both_directions(mapped_or_not: bool) -> None:
    with engine() as one, engine() as other, engine() as third:
        ends = TwoWay(one), TwoWay(other)
        for end in ends:
            end.answers = False
        order = ends[0].order(ends[1], places(0))
        ends[1].order(ends[0], places(0))
        until(lambda: all(end.wanted for end in ends), *ends)
        one.thread.push(ends[0].wanted[0].transfer_id, 0, SOURCES[:1])
        other.close()
        until(lambda: bool(ends[0].failed and ends[0].pushed), ends[0])
        assert ends[0].failed[0].transfer_id == order.transfer_id
        # The engine goes on in both directions with others.
        rest = TwoWay(third)
        ends[0].answers = True
        content = one.fill(*SOURCES), third.fill(*SOURCES)
        ends[0].order(rest, places(1))
        rest.order(ends[0], places(1))
        until(lambda: len(ends[0].landed) == len(rest.landed) == 1, ends[0], rest)
        assert (third.read(*places(1)), one.read(*places(1))) == content


def test_a_peer_that_falls_silent_loses_its_leases_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as one, engine() as other:
        ends = TwoWay(one), TwoWay(other)
        for end in ends:
            end.answers = False
        ends[0].order(ends[1], places(0))
        ends[1].order(ends[0], places(0))
        until(lambda: all(end.wanted for end in ends), *ends)

        def lost() -> bool:
            return bool(ends[0].failed and ends[0].pushed)

        # The other thread hangs: it neither pings nor answers.
        monkeypatch.setattr(other.thread, "_wake_engine", lambda: eventually(lost))
        until(lost, ends[0])
        assert ends[0].failed[0].kind is FailureKind.LEASE_EXPIRED
        assert ends[0].pushed[0].outcome is PushOutcome.LEASE_EXPIRED
        stats = one.thread.stats()
        assert stats.leases_expired_sending >= 1
        assert stats.leases_expired_receiving >= 1


def test_an_engine_does_not_fetch_from_itself() -> None:
    with engine(config=CONFIG) as one:
        end = TwoWay(one)
        end.order(end, places(0))
        until(lambda: bool(end.failed), end)
        assert "itself" in end.failed[0].reason
        assert not end.wanted
