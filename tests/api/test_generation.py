"""Tests when the reader of a generation is woken, and what it then reads."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.api.generation.generation import Generation, ReadPace, merge_outputs
from pdserve.errors import Internal
from pdserve.wire.engine import FinishReason, RequestOutput
from pdserve.wire.sampling_params import TokenLogprobs
from tests.api.node import WAIT_S
from tests.examples import examples


def generation_of(choices: int, interval: int) -> Generation:
    return Generation({i: i for i in range(choices)}, 60.0, lambda ids: None, ReadPace(interval))


async def due_tokens(interval: int, count: int) -> list[int]:
    """Returns after which of ``count`` tokens the reader is woken, if it reads at once."""

    generation, due = generation_of(1, interval), []
    for token in range(1, count + 1):
        if generation.put(RequestOutput(0, [token])):
            due.append(token)
            await generation.wait()
    generation.close()
    return due


async def test_the_first_token_comes_at_once_and_then_so_many_together() -> None:
    assert await due_tokens(1, 4) == [1, 2, 3, 4]
    assert await due_tokens(3, 9) == [1, 4, 7]
    assert await due_tokens(1_000, 1_000) == [1]


async def test_each_choice_has_its_own_count() -> None:
    generation, seen = generation_of(2, 3), []
    for local_id, token in ((0, 1), (1, 2), (0, 3), (1, 4), (0, 5), (0, 6), (1, 7)):
        if generation.put(RequestOutput(local_id, [token])):
            seen.append([(item.choice, item.output.new_token_ids) for item in await generation.wait()])
    generation.put(RequestOutput(1, [8], FinishReason.STOP))
    seen.append([(item.choice, item.output.new_token_ids) for item in await generation.wait()])
    generation.close()
    assert seen == [[(0, [1])], [(1, [2])], [(0, [3, 5, 6])], [(1, [4, 7, 8])]]


async def test_a_reader_is_not_woken_between() -> None:
    generation = generation_of(1, 3)
    generation.deliver(RequestOutput(0, [1]))
    await generation.wait()
    reader = asyncio.create_task(generation.wait())
    for token in (2, 3):
        generation.deliver(RequestOutput(0, [token]))
        generation.wake()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not reader.done()
    generation.deliver(RequestOutput(0, [4]))
    assert [item.output.new_token_ids for item in await asyncio.wait_for(reader, WAIT_S)] == [[2, 3, 4]]
    generation.close()


async def test_the_failure_of_one_choice_brings_out_what_the_others_have() -> None:
    generation = generation_of(3, 10)
    for token in (1, 2, 3):
        for local_id in (0, 1):
            if generation.put(RequestOutput(local_id, [token])):
                await generation.wait()
    assert generation.put(RequestOutput(0, [], FinishReason.DEADLINE))
    items = await generation.wait()
    generation.close()
    assert {item.choice: (item.output.new_token_ids, item.output.finish) for item in items} == {
        0: ([2, 3], FinishReason.DEADLINE),
        1: ([2, 3], None),
    }


async def test_a_lost_engine_ends_all_with_what_they_have() -> None:
    generation = generation_of(2, 10)
    for token in (1, 2):
        generation.put(RequestOutput(0, [token]))
    generation.fail(Internal("lost"))
    items = await generation.wait()
    generation.close()
    assert {item.choice: (item.output.new_token_ids, item.output.finish) for item in items} == {
        0: ([1, 2], FinishReason.ERROR),
        1: ([], FinishReason.ERROR),
    }


@settings(max_examples=examples(200))
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=30),
)
def test_nothing_is_lost_or_out_of_order(interval: int, events: list[tuple[int, int, bool]]) -> None:
    """The engine sends outputs of one to three tokens for three choices, and a woken reader may be late."""

    async def scenario() -> None:
        generation = generation_of(3, interval)
        sent: list[list[int]] = [[], [], []]
        got: list[list[int]] = [[], [], []]

        async def take() -> None:
            for item in await asyncio.wait_for(generation.wait(), WAIT_S):
                got[item.choice] += item.output.new_token_ids

        due = False
        for number, (choice, count, lazy) in enumerate(events):
            tokens = [number * 10 + i for i in range(count)]
            due = generation.put(RequestOutput(choice, tokens)) or due
            sent[choice] += tokens
            if due and not lazy:
                await take()
                due = False
            if not due:
                assert all(len(ours) - len(theirs) < interval for ours, theirs in zip(sent, got, strict=True))
        for choice in range(3):
            generation.put(RequestOutput(choice, [], FinishReason.LENGTH))
        await take()
        generation.close()
        assert got == sent

    asyncio.run(scenario())


def test_merged_outputs_keep_log_probabilities_and_the_end() -> None:
    logprobs = [TokenLogprobs(-float(i), 1, ()) for i in range(3)]
    whole = merge_outputs(
        [
            RequestOutput(7, [1, 2], logprobs=logprobs[:2]),
            RequestOutput(7, [3], logprobs=logprobs[2:]),
            RequestOutput(7, [], FinishReason.ERROR, None, "why"),
        ]
    )
    assert whole == RequestOutput(7, [1, 2, 3], FinishReason.ERROR, None, "why", logprobs)
    assert merge_outputs([RequestOutput(7, [1]), RequestOutput(7, [2])]) == RequestOutput(7, [1, 2])


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    turn_tokens=st.integers(1, 30),
    failing=st.none() | st.integers(0, 4),
)
def test_much_is_read_in_several_turns_and_a_failure_last(
    counts: list[int], turn_tokens: int, failing: int | None
) -> None:
    """Neither a client that reads late nor many answers at the same step delay other clients, and nothing is lost."""

    async def scenario() -> None:
        generation = Generation(
            {i: i for i in range(len(counts))}, 60.0, lambda ids: None, ReadPace(1_000, turn_tokens)
        )
        failed = None if failing is None else failing % len(counts)
        for choice in sorted(range(len(counts)), key=lambda choice: choice != failed):
            for token in range(counts[choice]):
                generation.put(RequestOutput(choice, [token]))
            reason = FinishReason.ERROR if choice == failed else FinishReason.STOP
            generation.put(RequestOutput(choice, [], reason))
        read: dict[int, list[int]] = {choice: [] for choice in range(len(counts))}
        ended: list[int] = []
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count_turns())
        waits = 0
        while len(ended) < len(counts):
            items = await generation.wait()
            waits += 1
            assert sum(len(item.output.new_token_ids) for item in items) <= turn_tokens
            for item in items:
                read[item.choice] += item.output.new_token_ids
                ended += [item.choice] if item.output.finish is not None else []
        assert read == {choice: list(range(count)) for choice, count in enumerate(counts)}
        assert failed is None or ended[-1] == failed
        assert turns >= waits - 2, "the loop turns between"
        counting.cancel()
        generation.close()

    asyncio.run(scenario())


async def test_a_reader_that_is_in_a_hurry_gets_what_there_is() -> None:
    generation = generation_of(2, 100)
    assert await generation.wait(0.0) == []
    generation.deliver(RequestOutput(0, [1]))
    assert [item.output.new_token_ids for item in await generation.wait(WAIT_S)] == [[1]]
    generation.deliver(RequestOutput(0, [2]))
    generation.deliver(RequestOutput(0, [3]))
    assert [(item.choice, item.output.new_token_ids) for item in await generation.wait(0.0)] == [(0, [2, 3])]
    assert await generation.wait(0.0) == []
    for token in range(100):
        generation.deliver(RequestOutput(0, [token]))
    assert [len(item.output.new_token_ids) for item in await generation.wait(WAIT_S)] == [100]
    generation.close()
