"""Tests the blocks of models with cache groups: windows, and states, beside whole contexts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_table import NONE, BlockTable, StateTable, WindowTable
from pdserve.engine.kv_cache.block_tables import BlockTables
from pdserve.engine.kv_cache.prefix_cache import Match
from pdserve.engine.request import Request
from pdserve.wire.cache_groups import GroupBlocks, Keep, moved_blocks
from pdserve.wire.ids import new_id
from pdserve.wire.sampling_params import SamplingParams
from tests.engine.fake_model import FakeModel, Slot, digests, groups_of
from tests.examples import examples
from tests.terms import made_terms

BLOCK_SIZE = 4
WINDOW = (Keep.WINDOW, 6)
STATE = (Keep.LATEST, 0)


def manager(
    keeps: Sequence[tuple[Keep, int]], num_blocks: int = 16, count: int = 16
) -> tuple[BlockManager, tuple[GroupBlocks, ...]]:
    groups = groups_of([(*keep, count) for keep in keeps], num_blocks)
    return BlockManager(num_blocks, BLOCK_SIZE, bounded=groups[1:], block_bytes=groups[0].block_bytes), groups


def made_request(tokens: Sequence[int], prompt: int, salt: str = "") -> Request:
    return Request(
        uuid=new_id(),
        token_ids=list(tokens),
        num_prompt_tokens=prompt,
        sampling=SamplingParams(max_tokens=8, seed=0),
        arrived=0.0,
        terms=made_terms(100, cache_salt=salt),
        local_id=0,
    )


def all_free(blocks: BlockManager) -> bool:
    return all(pool.num_free == len(pool.ids) for pool in blocks.pools)


# ---------------------------------------------------------------- windows


def test_a_window_has_the_blocks_that_the_next_tokens_see_and_no_others() -> None:
    blocks, _ = manager([WINDOW])
    table = BlockTable()
    for computed in range(30):
        blocks.grow(table, computed + 1)
        assert blocks.grow_bounded(table, computed, computed + 1)
        blocks.give_back(table, computed + 1)
        (held,) = table.others
        assert isinstance(held, list)
        needed = blocks.bounded[0].needed(computed + 1, BLOCK_SIZE)
        assert [number for number, block in enumerate(held) if block != NONE] == list(needed)
    blocks.free(table)
    assert all_free(blocks)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_takes_and_gives_back_windows_only_once_for_each_block(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ``ahead`` of the tokens of another one has blocks before the tokens of that one are final."""
    blocks, _ = manager([WINDOW, (Keep.WINDOW, 9)], num_blocks=24)
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        call = getattr(blocks, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return call(*arguments)

        monkeypatch.setattr(blocks, name, counted)

    count("grow_bounded")
    count("give_back")
    tables, request, filled = BlockTables(blocks), made_request(range(10, 100), 4), 20
    for tokens in range(1, filled * BLOCK_SIZE + 1):
        assert tables.reserve(request, tokens + ahead)
        held = request.block_table.num_bounded()
        assert all(count <= most for count, most in zip(held, blocks.most_blocks(tokens + ahead), strict=True))
        tables.computed(request, tokens)
        for spec, table in zip(blocks.bounded, request.block_table.others, strict=True):
            assert isinstance(table, WindowTable)
            needed = spec.needed(tokens, BLOCK_SIZE)
            assert NONE not in table[needed.start : needed.stop]
    # From the tokens that are final, a step ahead is in another block twice.
    assert calls == {"grow_bounded": filled * (1 + ahead), "give_back": filled}
    blocks.free(request.block_table)
    assert all_free(blocks)


def test_what_was_taken_for_a_transfer_that_brought_nothing_is_no_block_of_the_context() -> None:
    """A first transfer was to bring 20 tokens, and a second one brings 23: other blocks of the window."""
    blocks, _ = manager([WINDOW])
    tables = BlockTables(blocks)
    request = made_request(range(10, 34), 24)
    tables.admit(request, ())
    assert tables.reserve_landing(request, 20)
    assert tables.reserve_landing(request, 24)
    (held,) = request.block_table.others
    assert isinstance(held, list)
    needed = blocks.bounded[0].needed(24, BLOCK_SIZE)
    assert [number for number, block in enumerate(held) if block != NONE] == list(needed)
    tables.computed(request, 24)
    assert len(blocks.pools[1].cache) == len(needed)


def test_a_prefix_that_a_landed_prompt_began_with_goes_back() -> None:
    """Its window begins where no token behind the prompt sees anything."""
    blocks, _ = manager([WINDOW])
    tables = BlockTables(blocks)
    first = made_request(range(10, 19), 8)
    tables.admit(first, ())
    assert tables.reserve(first, 8)
    tables.computed(first, 8)
    longer = made_request(range(10, 50), 39)
    tables.admit(longer, tables.find(longer))
    assert longer.num_computed_tokens == 8
    assert tables.reserve_landing(longer, 39)
    tables.computed(longer, 39)
    (held,) = longer.block_table.others
    assert isinstance(held, list)
    assert [number for number, block in enumerate(held) if block != NONE] == [8, 9]


# ---------------------------------------------------------------- states


def test_a_step_writes_a_fresh_block_and_the_state_before_goes_when_its_tokens_are_final() -> None:
    blocks, _ = manager([STATE])
    tables = BlockTables(blocks)
    request = made_request(range(10, 20), 10)
    tables.admit(request, ())
    assert tables.reserve(request, 6)
    ((source, first),) = request.block_table.row_tables()
    assert source == NONE
    tables.computed(request, 0)
    assert tables.reserve(request, 6)
    assert request.block_table.row_tables() == ((NONE, first),), "the same step once more"
    tables.computed(request, 6)
    assert tables.reserve(request, 10)
    ((source, second),) = request.block_table.row_tables()
    assert source == first != second
    assert request.block_table.row_tables(1) == request.block_table.row_tables(2) == ((second, second),)
    tables.computed(request, 10)
    assert blocks.pools[1].num_free == 15
    blocks.free(request.block_table)
    assert all_free(blocks)


def test_a_state_is_found_only_behind_the_blocks_at_whose_end_it_stands() -> None:
    blocks, _ = manager([STATE])
    tables = BlockTables(blocks)
    request = made_request(range(10, 30), 20)
    tables.admit(request, ())
    ends = []
    while request.num_computed_tokens < 20:
        left = 20 - request.num_computed_tokens
        tokens = request.num_computed_tokens + tables.chunk_end(request, min(left, 10))
        assert tables.reserve(request, tokens)
        tables.computed(request, tokens)
        ends.append(tokens)
    assert ends == [8, 16, 20]
    for length, found in ((8, 0), (9, 0), (10, 2), (12, 2), (17, 2), (18, 4), (21, 4)):
        # Where a single token would be left behind a state, that one is of no use.
        other = made_request([*range(10, 30), 99][:length], length)
        assert len(tables.find(other)) == found
    assert len(tables.find(made_request(range(10, 30), 20, salt="other"))) == 0


def test_a_state_that_stands_inside_a_block_is_not_found() -> None:
    """Tokens of an answer that are replayed in one step pass the end of a block."""
    blocks, _ = manager([STATE])
    tables = BlockTables(blocks)
    request = made_request(range(10, 25), 10)
    tables.admit(request, ())
    for tokens in (8, 10, 14):
        assert tables.reserve(request, tokens)
        tables.computed(request, tokens)
    assert len(tables.find(made_request(range(10, 30), 20))) == 2


def test_an_answer_that_goes_on_finds_no_state_before_the_last_token_of_its_prompt() -> None:
    """That token would be a row of its own. Whole contexts are there up to the answer, but no state is."""
    blocks, _ = manager([STATE])
    tables = BlockTables(blocks)
    longer = made_request(range(10, 50), 40)
    tables.admit(longer, ())
    for tokens in (8, 20, 36):
        assert tables.reserve(longer, tokens)
        tables.computed(longer, tokens)
    assert len(tables.find(made_request(range(10, 36), 20))) == 5
    resumed = made_request(range(10, 36), 21)
    for _ in range(2):
        assert len(tables.find(resumed)) == 2


def test_the_newest_states_of_an_answer_are_found_and_older_ones_go() -> None:
    """States that are kept are 100 blocks apart, beside the one before the end of the prompt."""
    blocks, _ = manager([STATE])
    blocks.spacing = 100
    tables = BlockTables(blocks)
    request = made_request(range(10, 50), 10)
    tables.admit(request, ())
    longer = made_request(range(10, 60), 50)
    found = []
    for tokens in (8, 10, *range(11, 33)):
        assert tables.reserve(request, tokens)
        tables.computed(request, tokens)
        if not tokens % BLOCK_SIZE:
            found.append(len(tables.find(longer)))
            states = blocks.pools[1].cache
            names = longer.block_hashes
            assert [n for n in range(1, 9) if states.block_of(names[n - 1]) is not None] == sorted({2, *found[-2:]})
    assert found == [2, 3, 4, 5, 6, 7, 8]
    assert (request.block_table.checkpoint, request.block_table.last_state) == (2, 8)
    blocks.free(request.block_table)
    assert all_free(blocks)
    assert len(tables.find(longer)) == 8, "the next turn begins there"


def test_a_state_that_another_request_goes_on_from_does_not_go() -> None:
    blocks, _ = manager([STATE], num_blocks=32)
    blocks.spacing = 100
    tables = BlockTables(blocks)
    request, other = made_request(range(10, 40), 4), made_request(range(10, 60), 50)
    tables.admit(request, ())
    for tokens in (4, *range(5, 9)):
        assert tables.reserve(request, tokens)
        tables.computed(request, tokens)
    tables.admit(other, tables.find(other))
    assert other.num_computed_tokens == 8
    (state,) = (held.present for held in other.block_table.others if isinstance(held, StateTable))
    for tokens in range(9, 25):
        assert tables.reserve(request, tokens)
        tables.computed(request, tokens)
    assert blocks.pools[1].cache.block_of(request.block_hashes[1]) == state
    blocks.free(other.block_table)
    blocks.free(request.block_table)
    assert all_free(blocks)


def test_no_state_is_found_once_its_block_was_taken() -> None:
    blocks, _ = manager([STATE], count=3)
    tables = BlockTables(blocks)
    request = made_request(range(10, 30), 20)
    tables.admit(request, ())
    for tokens in (16, 20):
        assert tables.reserve(request, tokens)
        tables.computed(request, tokens)
    blocks.free(request.block_table)
    again = made_request(range(10, 30), 20)
    assert len(tables.find(again)) == 4
    others = [made_request(range(100 + i, 104 + i), 4) for i in range(3)]
    for other in others:
        tables.admit(other, ())
        assert tables.reserve(other, 4)
    assert len(tables.find(again)) == 0
    assert blocks.match(again.block_hashes, 4, Match()), "whole contexts are still there"


# ---------------------------------------------------------------- values that are not finite


@pytest.mark.parametrize("keep", [WINDOW, STATE])
def test_a_faulty_context_leaves_nothing_that_is_found_again(keep: tuple[Keep, int]) -> None:
    blocks, _ = manager([keep])
    tables = BlockTables(blocks)
    request = made_request(range(10, 30), 20)
    tables.admit(request, ())
    for tokens in (8, 16, 20):
        assert tables.reserve(request, tokens)
        tables.computed(request, tokens)
    assert len(blocks.pools[1].cache) > 2 - (keep is STATE)
    blocks.taint_context(request.block_table, request.block_hashes)
    assert [len(pool.cache) for pool in blocks.pools] == [0, 0]
    blocks.free(request.block_table)
    assert not all_free(blocks)
    cleared: list[int] = []
    blocks.clean(cleared.extend)
    assert len(cleared) == len(set(cleared))
    assert all_free(blocks)


# ---------------------------------------------------------------- the longest prefix


def test_the_longest_prefix_that_all_groups_have_is_found() -> None:
    """Compared with a search that tries every length, with random blocks in the caches."""
    random = Random(1)
    for _ in range(200):
        keeps = random.choice([[WINDOW], [STATE], [WINDOW, STATE], [STATE, (Keep.WINDOW, 13), (Keep.WINDOW, 1)]])
        blocks, _ = manager(keeps)
        hashes = [bytes([i]) * 32 for i in range(12)]
        for pool in blocks.pools[1:]:
            known = random.sample(range(12), random.choice((3, 8, 11)))
            for block, number in zip(pool.ids, known, strict=False):
                pool.cache.add(block, hashes[number])
        for most in range(13):
            longest = next((length for length in range(most, 0, -1) if can_go_on(blocks, hashes, length)), 0)
            assert blocks.usable_prefix(hashes, most) == longest


def can_go_on(blocks: BlockManager, hashes: Sequence[bytes], length: int) -> bool:
    for spec, pool in zip(blocks.bounded, blocks.pools[1:], strict=True):
        numbers = spec.needed(length * BLOCK_SIZE, BLOCK_SIZE)
        wanted = [length - 1] if spec.keep is Keep.LATEST else list(numbers)
        if any(pool.cache.block_of(hashes[number]) is None for number in wanted):
            return False
    return True


# ---------------------------------------------------------------- any order


class GroupLife(RuleBasedStateMachine):
    """Whatever happens to contexts, each token finds what it needs, and each block is free in the end.

    The model knows of each block from which tokens it was computed, and each step checks that.
    """

    KEEPS: Sequence[tuple[Keep, int]] = (WINDOW, STATE, (Keep.WINDOW, 11))

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.groups = manager(self.KEEPS, num_blocks=24, count=14)
        self.tables = BlockTables(self.blocks)
        self.model = FakeModel(24, BLOCK_SIZE, self.groups)
        self.live: list[Request] = []
        self.quarantined: list[int] = []

    def pick(self, data: st.DataObject) -> Request | None:
        return data.draw(st.sampled_from(self.live)) if self.live else None

    def copies(self) -> None:
        """Copies come before whatever writes next."""
        self.model.copy(self.blocks.take_copies())

    @rule(
        stem=st.integers(0, 14),
        tail=st.lists(st.just(30), max_size=9) | st.lists(st.sampled_from((30, 31)), max_size=9),
        salt=st.sampled_from("ab"),
    )
    def arrive(self, stem: int, tail: list[int], salt: str) -> None:
        tokens = [10] * stem + tail or [10]
        request = made_request(tokens, len(tokens), salt)
        found = self.tables.find(request)
        if self.tables.missing(request, found) <= self.tables.free_beside(found):
            self.tables.admit(request, found)
            self.live.append(request)

    @rule(data=st.data(), most=st.integers(1, 12), refused=st.booleans())
    def step(self, data: st.DataObject, most: int, refused: bool) -> None:
        request = self.pick(data)
        if request is None:
            return
        self.copies()
        if request.num_uncomputed_tokens == 0:
            # What answers begin with, prompts may have as well.
            request.token_ids += [30] * data.draw(st.integers(1, 6))
        start, tokens = request.num_computed_tokens, min(most, request.num_uncomputed_tokens)
        if not request.prompt_is_computed:
            tokens = self.tables.chunk_end(request, min(tokens, request.num_prompt_tokens - start))
        if not self.tables.reserve(request, start + tokens):
            return
        known, table = request.token_ids, request.block_table
        salt = request.terms.prompt.cache_salt
        self.model.run(known, start, known[start : start + tokens], table, salt, table.row_tables())
        self.tables.computed(request, start if refused else start + tokens)

    @rule(data=st.data(), drafts=st.lists(st.sampled_from((30, 31)), max_size=6))
    def step_with_drafts(self, data: st.DataObject, drafts: list[int]) -> None:
        """Computes an answer's last token and drafts, of which some are accepted, and maybe not even the token."""
        request = self.pick(data)
        if request is None or not request.prompt_is_computed or request.num_uncomputed_tokens > 1:
            return
        self.copies()
        if request.num_uncomputed_tokens == 0:
            request.token_ids.append(30)
        start, table, salt = request.num_computed_tokens, request.block_table, request.terms.prompt.cache_salt
        if not self.tables.reserve(request, start + 1 + len(drafts)):
            return
        drafts = drafts[: self.tables.reserve_drafts(request, len(drafts))]
        known = [*request.token_ids, *drafts]
        for number in range(1 + len(drafts)):
            at = start + number
            self.model.run(known, at, known[at : at + 1], table, salt, table.row_tables(number))
        accepted = data.draw(st.integers(-1, len(drafts)))
        for number in range(1 + accepted):
            if number:
                request.token_ids.append(drafts[number - 1])
            self.tables.computed(request, start + number + 1)
        self.tables.drop_drafts(request)

    @rule(data=st.data(), landed=st.booleans())
    def transfer(self, data: st.DataObject, landed: bool) -> None:
        """Brings a prompt, its first blocks, or nothing: then something may still write to a part of the blocks."""
        request = self.pick(data)
        if request is None or request.num_prompt_tokens < request.num_computed_tokens + 2:
            return
        if request.num_computed_tokens % BLOCK_SIZE:
            return
        self.copies()
        first = request.num_computed_tokens // BLOCK_SIZE
        ends = range(first + 1, self.tables.fillable(request) + 1)
        tokens = data.draw(st.sampled_from([request.num_prompt_tokens, *(end * BLOCK_SIZE for end in ends)]))
        if not self.tables.reserve_landing(request, tokens):
            return
        moved = moved_blocks([group.spec for group in self.groups], BLOCK_SIZE, first, tokens)
        ids = request.block_table.blocks_of(moved)
        if landed:
            self.land(request, tokens, ids)
            self.tables.computed(request, tokens)
            return
        late = data.draw(st.lists(st.sampled_from(ids), unique=True))
        self.blocks.quarantine(late)
        self.quarantined += late
        if not self.blocks.replace(request.block_table, late):
            self.forget(request)

    def land(self, request: Request, tokens: int, ids: Sequence[int]) -> None:
        salt = request.terms.prompt.cache_salt
        slots = [Slot(digest, salt) for digest in digests(request.token_ids[:tokens])]
        specs, first = [group.spec for group in self.groups], request.num_computed_tokens // BLOCK_SIZE
        for block, place in zip(moved_blocks(specs, BLOCK_SIZE, first, tokens), ids, strict=True):
            if specs[block.group].keep is Keep.LATEST:
                content = slots[-1:] * BLOCK_SIZE
            else:
                content = slots[block.number * BLOCK_SIZE : (block.number + 1) * BLOCK_SIZE]
            self.model.memory[place][: len(content)] = content

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        if parent is None or parent.num_computed_tokens != parent.num_prompt_tokens:
            return
        self.copies()
        child = parent.add_child(seed=1, local_id=1, emitted=[31])
        parent.children.clear()
        if self.tables.fork(parent, child):
            self.live.append(child)

    @rule(data=st.data(), faulty=st.booleans())
    def end(self, data: st.DataObject, faulty: bool) -> None:
        request = self.pick(data)
        if request is None:
            return
        if faulty:
            self.copies()
            self.blocks.taint_context(request.block_table, request.block_hashes)
        self.forget(request)
        self.blocks.clean(self.model.clear)

    def forget(self, request: Request) -> None:
        self.live.remove(request)
        self.blocks.free(request.block_table)

    @rule()
    def release(self) -> None:
        self.blocks.end_quarantine(self.quarantined)
        self.quarantined.clear()

    @invariant()
    def every_block_is_held_by_those_who_have_it(self) -> None:
        held = Counter(block for request in self.live for block in request.block_table.every_block())
        copied = dict(self.blocks._copies)
        for pool in self.blocks.pools:
            taken = {block for block in (*held, *copied.values(), *self.quarantined) if block in pool.ids}
            unclean = [block for block in self.blocks._unclean if block in pool.ids]
            assert pool.num_free + len(taken) + len(unclean) == len(pool.ids)
        holders = held + Counter(copied.values())
        assert all(self.blocks.num_holders(block) == count for block, count in holders.items())

    @invariant()
    def windows_have_what_the_next_token_sees(self) -> None:
        for request in self.live:
            for spec, table in zip(self.blocks.bounded, request.block_table.others, strict=False):
                if isinstance(table, StateTable):
                    assert not table.drafted
                    assert (table.present != NONE) == (request.num_computed_tokens > 0)
                    continue
                needed = spec.needed(request.num_computed_tokens, BLOCK_SIZE)
                assert NONE not in table[needed.start : needed.stop]
                assert len(table) >= needed.stop
                # What goes before the next block is full does not go before that.
                seen = spec.needed(request.num_computed_tokens // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE)
                assert all(block == NONE for block in table[: seen.start])

    def teardown(self) -> None:
        for request in list(self.live):
            self.forget(request)
        self.blocks.end_quarantine(self.quarantined)
        self.blocks.clean(self.model.clear)
        assert all_free(self.blocks)


TestGroupLife = GroupLife.TestCase
TestGroupLife.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
