"""Tests what the prefix cache finds, shares and evicts, and what it never does."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.prefix_cache import Match, extend_hashes
from pdserve.errors import EngineError
from tests.engine.fake_engine import BLOCK_SIZE, FakeEngine
from tests.engine.fake_model import answer, talkative
from tests.examples import examples

PROMPT = list(range(100, 120))
"""A prompt of five full blocks."""


def hashes(tokens: list[int], salt: str = "", size: int = 2) -> list[bytes]:
    found: list[bytes] = []
    extend_hashes(found, tokens, len(tokens) // size, size, salt)
    return found


def matched(blocks: BlockManager, chain: list[bytes]) -> list[int]:
    """Looks hashes up for the first time."""
    return list(blocks.match(chain, len(chain), Match()))


# ------------------------------------------------------------ hashes


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
    st.sampled_from(["", "a"]),
    st.sampled_from(["", "a"]),
)
def test_hashes_are_equal_exactly_where_prefix_and_salt_are(
    left: list[int], right: list[int], salt: str, other: str
) -> None:
    ours, theirs = hashes(left, salt), hashes(right, other)
    assert all(len(one) == 32 for one in ours)
    for i, one in enumerate(ours):
        for j, two in enumerate(theirs):
            same = salt == other and i == j and left[: 2 * i + 2] == right[: 2 * j + 2]
            assert (one == two) is same


def test_hashes_do_not_depend_on_when_they_are_taken() -> None:
    found: list[bytes] = []
    for count in (1, 3, 3, 6):
        extend_hashes(found, PROMPT, count, 3, "s")
        assert len(found) == count
    assert found == hashes(PROMPT, "s", 3)


def test_token_ids_of_any_size_are_told_apart() -> None:
    assert len(set(hashes([1, 256, 65_536, 2**32 - 1], size=1))) == 4
    assert hashes([1, 0]) != hashes([256, 0])


# ------------------------------------------------------------ requests


def test_the_second_of_two_equal_prompts_computes_its_last_block_only() -> None:
    engine = FakeEngine(max_num_batched_tokens=64)
    first = engine.add(1, PROMPT, max_tokens=1)
    engine.run()
    second = engine.add(2, PROMPT, max_tokens=1)
    (work,) = engine.step().work
    # All five blocks are cached; the last is computed again, for the logits of its last token.
    assert (first.facts.cached_tokens, second.facts.cached_tokens, work.num_tokens) == (0, 16, 4)
    assert engine.outputs[1] == engine.outputs[2]
    assert engine.endings[2].report is not None
    assert engine.endings[2].report.cached_tokens == 16
    counters = engine.scheduler.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (40, 16)
    assert engine.idle


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 0), (6, 4), (8, 4), (9, 4), (10, 8), (23, 20)])
def test_partial_blocks_are_never_found_nor_all_of_a_prompt_but_one_token(length: int, cached: int) -> None:
    prompt = list(range(100, 100 + length))
    engine = FakeEngine()
    engine.add(1, prompt, max_tokens=1)
    engine.run()
    request = engine.add(2, prompt, max_tokens=3)
    engine.run()
    assert request.facts.cached_tokens == cached
    assert engine.outputs[2] == answer(prompt, 0, 3, 64)


def test_prompts_share_exactly_what_they_have_in_common() -> None:
    engine = FakeEngine()
    engine.add(1, PROMPT)
    engine.run()
    other = engine.add(2, [*PROMPT[:10], 7, *PROMPT[11:]])
    engine.run()
    assert other.facts.cached_tokens == 8


def test_running_requests_share_blocks_that_are_computed() -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    first = engine.add(1, PROMPT, max_tokens=9)
    engine.step()
    second = engine.add(2, PROMPT, max_tokens=9)
    engine.step()
    engine.step()
    shared = [block for block in first.block_table if engine.blocks.num_holders(block) == 2]
    assert shared == second.block_table[: len(shared)]
    assert len(shared) >= 2
    engine.run()
    assert engine.outputs[1] == engine.outputs[2] == answer(PROMPT, 0, 9, 64)


def test_salts_keep_prompts_apart() -> None:
    engine = FakeEngine()
    cached = []
    for local_id, salt in enumerate(["", "a", "b", "a"]):
        cached.append(engine.add(local_id, PROMPT, salt=salt))
        engine.run()
    assert [request.facts.cached_tokens for request in cached] == [0, 0, 0, 16]


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = FakeEngine()
    engine.add(1, PROMPT, max_tokens=30, seeds=[talkative(PROMPT, 30)])
    engine.run()
    said = engine.outputs[1]
    turn = engine.add(2, [*PROMPT, *said, 7, 7, 7])
    engine.run()
    # The last token of an answer is never computed.
    assert turn.facts.cached_tokens == (20 + len(said) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_switched_off_nothing_is_found() -> None:
    engine = FakeEngine(prefix_cache=False)
    for local_id in range(2):
        request = engine.add(local_id, PROMPT)
        engine.run()
        assert request.facts.cached_tokens == 0
    assert engine.blocks.num_cached == 0
    assert engine.outputs[0] == engine.outputs[1]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine = FakeEngine(num_blocks=9, max_len=32)
    prompts = [PROMPT[:10], [50, *PROMPT[1:10]]]
    seeds = [talkative(prompt, 14) for prompt in prompts]
    engine.add(0, prompts[0], max_tokens=14, seeds=seeds[:1])
    young = engine.add(1, prompts[1], max_tokens=14, seeds=seeds[1:])
    again = []
    for _ in range(100):
        plan = engine.step()
        if engine.scheduler.counters.preemptions:
            again += [work for work in plan.work if work.request is young]
    assert engine.scheduler.counters.preemptions == 1
    # Its first block, at least, is still cached, because the other request needed only a few blocks.
    assert 1 < again[0].num_tokens < len(young.token_ids) - BLOCK_SIZE
    assert [engine.outputs[i] for i in range(2)] == [answer(prompts[i], seeds[i], 14, 32) for i in range(2)]


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_start() -> None:
    engine = FakeEngine(num_blocks=8, max_len=32)
    first, second = [10] * 8, [20] * 8
    for local_id, prompt in enumerate((first, second, first)):
        engine.add(local_id, [*prompt, 7, 7], max_tokens=1)
        engine.run()
    assert engine.blocks.num_cached == 4
    # Five blocks are wanted, four are free: the end of the prefix that was used less recently goes.
    engine.add(3, [30] * 17, max_tokens=1)
    engine.run()
    assert len(matched(engine.blocks, hashes(first, size=4))) == 2
    assert len(matched(engine.blocks, hashes(second, size=4))) == 1


def test_a_request_that_needs_every_block_is_admitted_beside_a_full_cache() -> None:
    engine = FakeEngine(num_blocks=8, max_len=32)
    for local_id in range(3):
        engine.add(local_id, [local_id] * 12, max_tokens=1)
        engine.run()
    # The prompt begins with cached blocks, and needs all the others.
    prompt = [2] * 12 + [5] * 18
    request = engine.add(9, prompt, max_tokens=2)
    engine.run()
    assert request.facts.cached_tokens == 12
    assert engine.outputs[9] == answer(prompt, 0, 2, 32)
    assert engine.idle


class CountingDict(dict[bytes, int]):
    looks = 0

    def get(self, key: bytes, default: int | None = None) -> int | None:  # type: ignore[override]
        self.looks += 1
        return super().get(key, default)


def test_who_waits_looks_up_only_what_the_cache_has_learnt_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt uses all budgets. The others could go to a prefill node, but too much of them is cached for that."""
    engine = FakeEngine(num_blocks=200, max_len=200, max_num_batched_tokens=4)
    engine.add(1, PROMPT, max_tokens=1)
    engine.run()
    digests = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal digests
        digests += 1
        return blake2b(*args, **kwargs)

    blake2b = hashlib.blake2b
    engine.add(2, [9] * 80, max_tokens=1)
    engine.step()
    known = [engine.add(local_id, PROMPT, max_tokens=1, remote=True) for local_id in range(10, 20)]
    longer = [engine.add(local_id, [*PROMPT, 1, 2, 3, 4], max_tokens=1, remote=True) for local_id in range(20, 30)]
    tiny = [engine.add(local_id, [5], max_tokens=1, remote=True) for local_id in range(30, 40)]
    engine.step()
    cache = engine.blocks._cache
    cache._block_of = counting = CountingDict(cache._block_of)
    monkeypatch.setattr(hashlib, "blake2b", counted)
    for _ in range(10):
        counting.looks = digests = 0
        plan = engine.step()
        assert [work.request.local_id for work in plan.work] == [2]
        assert engine.scheduler.num_waiting == 30
        # Only the running prompt's new block is hashed, and no waiting prompt is walked through.
        assert digests <= 1
        assert counting.looks == 0
    monkeypatch.undo()
    engine.run()
    assert {request.facts.cached_tokens for request in known} == {16}
    assert {request.facts.cached_tokens for request in longer} == {20}
    assert {request.facts.cached_tokens for request in tiny} == {0}


# ------------------------------------------------------------ blocks


def held(blocks: BlockManager, tokens: list[int]) -> list[int]:
    """Returns a table of full blocks that hold ``tokens`` and can be found."""
    table: list[int] = []
    assert blocks.grow(table, len(tokens))
    for block, block_hash in zip(table, hashes(tokens), strict=True):
        blocks.remember(block, block_hash)
    return table


def test_what_is_not_finite_is_not_found_again_and_cleared_before_it_is_free() -> None:
    blocks = BlockManager(3, 2)
    table = held(blocks, [1, 2, 3, 4])
    other: list[int] = []
    blocks.share(other, table[:1])
    blocks.taint(table)
    assert matched(blocks, hashes([1, 2, 3, 4])) == []
    blocks.remember(other[0], hashes([1, 2])[0])
    assert blocks.num_cached == 0
    first, second = table
    cleared: list[int] = []
    blocks.free(table)
    blocks.clean(cleared.extend)
    assert cleared == [second]
    assert blocks.num_free == 2
    blocks.free(other)
    assert blocks.num_free == 2, "not before it is cleared"
    blocks.clean(cleared.extend)
    blocks.clean(cleared.extend)
    assert cleared == [second, first]
    assert blocks.num_free == 3


def test_shared_and_free_blocks_are_not_quarantined_and_idle_ones_not_freed() -> None:
    blocks = BlockManager(3, 2)
    table = held(blocks, [1, 2])
    with pytest.raises(EngineError, match="others may read"):
        blocks.quarantine(table)
    again = list(table)
    blocks.free(table)
    with pytest.raises(EngineError, match="freed twice"):
        blocks.free(again)
    with pytest.raises(EngineError, match="but not held"):
        blocks.remember(again[0], b"x")
    with pytest.raises(EngineError, match="but not held"):
        blocks.taint(again)
    with pytest.raises(EngineError, match="holds nothing"):
        blocks.share([], [2])


class CacheLife(RuleBasedStateMachine):
    """Compares a pool under traffic of few different prompts with a plain model of what each block holds."""

    SIZE = 10

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.SIZE, 2)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """The contents of each block, as all tokens up to its end."""
        self.waiting: list[tuple[list[bytes], Match]] = []
        """The matches of prompts that are looked up again and again."""

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def wait(self, tokens: list[int]) -> None:
        self.waiting.append((hashes(tokens), Match()))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def look_again(self, data: st.DataObject) -> None:
        chain, match = data.draw(st.sampled_from(self.waiting))
        count = data.draw(st.integers(len(match.blocks), len(chain)))
        assert list(self.blocks.match(chain, count, match)) == matched(self.blocks, chain[:count])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens: list[int]) -> None:
        """Finds, shares, grows and remembers full blocks, as the scheduler does."""
        chain = hashes(tokens)
        found = matched(self.blocks, chain)
        for i, block in enumerate(found):
            assert self.content[block] == tuple(tokens[: 2 * i + 2]), "found under another prompt's hash"
        room = self.blocks.free_beside(found)
        table: list[int] = []
        self.blocks.share(table, found)
        assert self.blocks.num_free == room
        if not self.blocks.grow(table, len(tokens)):
            self.blocks.free(table)
            return
        for i, block in enumerate(table[len(found) :], len(found)):
            self.content[block] = tuple(tokens[: 2 * i + 2])
            if 2 * i + 2 <= len(tokens):
                self.blocks.remember(block, chain[i])
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.blocks.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def taint(self, data: st.DataObject) -> None:
        self.blocks.taint(data.draw(st.sampled_from(self.tables)))

    @rule()
    def clean(self) -> None:
        held = {block for table in self.tables for block in table}

        def clear(blocks: object) -> None:
            assert isinstance(blocks, list)
            assert not held & set(blocks)

        self.blocks.clean(clear)

    @invariant()
    def holders_are_counted(self) -> None:
        held = [block for table in self.tables for block in table]
        for block in range(self.SIZE):
            assert self.blocks.num_holders(block) * (block in held) == held.count(block)
        assert self.blocks.num_free <= self.SIZE - len(set(held))

    def teardown(self) -> None:
        for table in self.tables:
            self.blocks.free(table)
        self.blocks.clean(lambda blocks: None)
        assert self.blocks.num_free == self.SIZE


TestCacheLife = CacheLife.TestCase
TestCacheLife.settings = settings(max_examples=examples(60))
