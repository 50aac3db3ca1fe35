"""Engines that lie about cache groups, or send blocks that nobody asked for, get an error and leave nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from pdserve.wire.cache_groups import GroupBlock, GroupSpec, Keep, moved_blocks
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import (
    CachedRequest,
    Digests,
    EngineSpec,
    Failed,
    FailureCause,
    FirstToken,
    Hello,
    PrefillRequest,
    Refused,
)
from pdserve_kvtransfer.events import (
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
)
from tests.eventually import eventually
from tests.kvtransfer.fakes import FakeDecode, FakePrefill, prefill_request
from tests.kvtransfer.grouped import GROUPS, REPLICATED, STATE, WHOLE, WINDOW, GroupedNode
from tests.kvtransfer.rig import SAMPLING, SPEC

TOKENS = 100
"""A prompt of seven blocks. Its window has the last three, and its state comes last."""
MOVED = moved_blocks(GROUPS, SPEC.block_size, 0, TOKENS)
ABSURD = 2**62


def changed(group: GroupSpec, **fields: object) -> GroupSpec:
    return msgspec.structs.replace(group, **fields)


LIES: dict[str, tuple[Sequence[GroupSpec], str]] = {
    "no groups": ((), "cache groups"),
    "one group less": ((WHOLE, WINDOW), "cache groups"),
    "one group twice": ((WHOLE, WINDOW, STATE, STATE), "cache groups"),
    "another order": ((WHOLE, STATE, WINDOW), "cache groups"),
    "a thousand groups": ((WHOLE,) * 1_000, "cache groups"),
    "another window": ((WHOLE, changed(WINDOW, window=33), STATE), "cache group 'window 32': window"),
    "a window of all": ((WHOLE, changed(WINDOW, window=ABSURD), STATE), "cache group 'window 32': window"),
    "no window": ((WHOLE, changed(WINDOW, window=0), STATE), "cache group 'window 32': window"),
    "a window without end": ((WHOLE, changed(WINDOW, keep=Keep.ALL), STATE), "cache group 'window 32': keep"),
    "larger states": (
        (WHOLE, WINDOW, changed(STATE, head_bytes=STATE.head_bytes + 4)),
        "cache group 'state': head_bytes",
    ),
    "states of 4 EiB": ((WHOLE, WINDOW, changed(STATE, head_bytes=ABSURD)), "cache group 'state': head_bytes"),
    "states of no bytes": ((WHOLE, WINDOW, changed(STATE, head_bytes=0)), "cache group 'state': head_bytes"),
    "states of less than no bytes": ((WHOLE, WINDOW, changed(STATE, head_bytes=-1)), "cache group 'state': head_bytes"),
    "whole states": ((WHOLE, WINDOW, REPLICATED), "cache group 'state': heads"),
    "more heads": ((changed(WHOLE, heads=ABSURD), WINDOW, STATE), "cache group 'all': heads"),
    "more layers": ((WHOLE, changed(WINDOW, layers=3), STATE), "cache group 'window 32': layers"),
    "other numbers": ((WHOLE, WINDOW, changed(STATE, dtype="bf16")), "cache group 'state': dtype"),
}
"""What an engine says of its groups, and what the error names."""


def spec_of(groups: Sequence[GroupSpec]) -> EngineSpec:
    return msgspec.structs.replace(SPEC, groups=tuple(groups))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[GroupedNode]:
    made = GroupedNode("node", 1, GROUPS, tmp_path)
    for group in made.groups:
        for block in group.ids:
            made.fill(block)
    yield made
    made.close()


def contents(node: GroupedNode) -> bytes:
    return bytes(node.engine.region.bytes_at(0, max(one.start + one.count * one.block_bytes for one in node.groups)))


def order(node: GroupedNode, target: PrefillTarget) -> FetchOrder:
    return FetchOrder(
        transfer_id=TransferId(new_id(), 0, node.engine.boot_id),
        target=target,
        token_ids=list(range(TOKENS)),
        first_block=0,
        block_ids=node.ids(MOVED),
        sampling=SAMPLING,
        deadline_s=30.0,
    )


@pytest.mark.parametrize("lie", LIES)
def test_a_prefill_engine_with_other_groups_sends_nothing(node: GroupedNode, lie: str) -> None:
    groups, named = LIES[lie]
    before = contents(node)
    with FakePrefill() as prefill:
        node.engine.thread.fetch(order(node, prefill.target))
        prefill.welcome(spec_of(groups))
        failed = node.engine.next(FetchFailed)
        assert (failed.kind, failed.landed, failed.quarantined) == (FailureKind.MISFIT, 0, ())
        assert failed.reason.count(named) == 1
    assert contents(node) == before
    assert node.engine.thread.stats().quarantined_blocks == 0


@pytest.mark.parametrize("lie", LIES)
def test_a_decode_engine_with_other_groups_is_refused(node: GroupedNode, lie: str) -> None:
    groups, named = LIES[lie]
    with FakeDecode(node.engine.address) as decode:
        decode.send(Hello(decode.boot_id, spec_of(groups), [decode.link.address]))
        assert decode.next(Refused).field == named
        # There is no link over which it could ask.
        decode.send(prefill_request(decode.boot_id, TOKENS))
        assert decode.next(Refused).field == "handshake"
    assert node.engine.quiet()


@dataclass
class Attack:
    """A prefill engine that may send what it likes, and the transfer that it was asked for."""

    prefill: FakePrefill
    node: GroupedNode
    request: PrefillRequest
    block_ids: tuple[int, ...]
    before: bytes

    def piece(self, place: int) -> memoryview:
        """Returns the bytes of the transfer's block at this place, which say where they belong."""
        group = self.node.specs[MOVED[place].group]
        return memoryview(bytes([place + 1]) * (group.head_bytes * max(1, group.heads)))

    def finish_well(self) -> None:
        """Sends all that was asked for. It lands, and nothing else has changed."""
        for place in range(len(MOVED)):
            self.prefill.deliver(self.request, place, self.piece(place))
        self.prefill.send(FirstToken(self.request.transfer_id, (SampledToken(1),), 0))
        self.node.engine.next(FirstTokenArrived)
        self.node.engine.next(FetchLanded)
        region = self.node.engine.region
        for place, block_id in enumerate(self.block_ids):
            assert bytes(region.block(block_id)) == bytes(self.piece(place))
            start = self.node.groups[MOVED[place].group].place(block_id)
            region.block(block_id)[:] = self.before[start : start + len(region.block(block_id))]
        assert contents(self.node) == self.before


@pytest.fixture
def attack(node: GroupedNode) -> Iterator[Attack]:
    before = contents(node)
    with FakePrefill() as prefill:
        asked = order(node, prefill.target)
        node.engine.thread.fetch(asked)
        yield Attack(prefill, node, prefill.welcome_and_take(spec_of(GROUPS)), asked.block_ids, before)


STATE_AT = MOVED.index(GroupBlock(2, 0))
WINDOW_AT = next(place for place, block in enumerate(MOVED) if block.group == 1)


@pytest.mark.parametrize(
    ("tag", "place", "of"),
    [
        (0, len(MOVED), STATE_AT),
        (0, 2**24 - 1, STATE_AT),
        (0, STATE_AT, WINDOW_AT),
        (0, WINDOW_AT, STATE_AT),
        (0, WINDOW_AT, 0),
        (1, STATE_AT, STATE_AT),
    ],
    ids=[
        "a state behind the last block",
        "a state at the last index that there may be",
        "a block of the window as a state",
        "a state as a block of the window",
        "a block of whole contexts as one of the window",
        "the state of another request",
    ],
)
def test_a_block_that_belongs_nowhere_is_dropped(attack: Attack, tag: int, place: int, of: int) -> None:
    attack.prefill.post(attack.piece(of), attack.request.tag ^ tag, place)
    attack.prefill.finish()
    eventually(lambda: attack.node.engine.thread.stats().stale_blocks_dropped == 1)
    assert contents(attack.node) == attack.before
    attack.finish_well()


def test_a_state_comes_once(attack: Attack) -> None:
    attack.prefill.post(attack.piece(STATE_AT), attack.request.tag, STATE_AT)
    attack.prefill.post(memoryview(bytes(len(attack.piece(STATE_AT)))), attack.request.tag, STATE_AT)
    attack.prefill.finish()
    eventually(lambda: attack.node.engine.thread.stats().stale_blocks_dropped == 1)
    state = attack.node.engine.region.block(attack.block_ids[STATE_AT])
    eventually(lambda: bytes(state) == bytes(attack.piece(STATE_AT)), "the first one lands")


@pytest.mark.parametrize("first", [len(MOVED), 2**40, 2**63])
def test_digests_of_blocks_that_nobody_wants_change_nothing(attack: Attack, first: int) -> None:
    attack.prefill.send(Digests(attack.request.transfer_id, 0, 0, first, (1, 2)))
    attack.finish_well()


@pytest.mark.parametrize("source", [1, 2**63])
def test_digests_of_a_rank_that_there_is_not_change_nothing(attack: Attack, source: int) -> None:
    attack.prefill.send(Digests(attack.request.transfer_id, source, 0, STATE_AT, (0,)))
    attack.finish_well()


def test_the_state_of_another_prompt_is_corrupt(attack: Attack) -> None:
    """A digest is of the bytes and of the transfer for which they are."""
    for place in range(STATE_AT):
        attack.prefill.deliver(attack.request, place, attack.piece(place))
    attack.prefill.post(attack.piece(STATE_AT), attack.request.tag, STATE_AT)
    attack.prefill.finish()
    other = msgspec.structs.replace(attack.request, tag=attack.request.tag ^ 1)
    attack.prefill.announce(other, STATE_AT, attack.piece(STATE_AT))
    failed = attack.node.engine.next(FetchFailed)
    assert (failed.kind, failed.landed, failed.quarantined) == (FailureKind.CORRUPT, STATE_AT, ())


@pytest.mark.parametrize("first", [7, 2**40, 2**63 - 1])
def test_an_order_for_blocks_behind_a_prompt_is_refused_though_its_state_has_no_number(
    node: GroupedNode, first: int
) -> None:
    with FakeDecode(node.engine.address) as decode:
        decode.greet(spec_of(GROUPS))
        decode.send(prefill_request(decode.boot_id, TOKENS, first))
        assert decode.next(Failed).cause is FailureCause.PROMPT
    assert node.engine.quiet()


def test_a_holder_gives_no_more_blocks_than_were_asked_for(node: GroupedNode) -> None:
    """A decode engine names one block, so neither windows nor states of longer contexts go to it."""
    with FakeDecode(node.engine.address) as decode:
        decode.greet(spec_of(GROUPS))
        transfer = TransferId(new_id(), 0, decode.boot_id)
        decode.send(CachedRequest(transfer_id=transfer, tag=5, hashes=(bytes(32),), deadline_s=30.0))
        node.engine.next(CachedWanted)
        node.engine.thread.push(transfer, 0, node.ids(MOVED))
        assert "not asked for" in decode.next(Failed).reason
        node.engine.next(PushCancelled)
        assert node.engine.next(PushEnded).outcome is PushOutcome.FAILED


def test_a_push_takes_no_window_for_a_state(node: GroupedNode) -> None:
    with FakeDecode(node.engine.address) as decode:
        decode.greet(spec_of(GROUPS))
        request = replace_tokens(prefill_request(decode.boot_id), TOKENS)
        decode.send(request)
        node.engine.next(PushWanted)
        node.engine.thread.push(request.transfer_id, STATE_AT, node.ids(MOVED)[WINDOW_AT : WINDOW_AT + 1])
        assert "those of another" in decode.next(Failed).reason
        node.engine.next(PushCancelled)
        assert node.engine.next(PushEnded).outcome is PushOutcome.FAILED


def replace_tokens(request: PrefillRequest, count: int) -> PrefillRequest:
    return msgspec.structs.replace(request, token_ids=list(range(count)))
