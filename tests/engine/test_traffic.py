"""Tests whole engines under random traffic: every answer is right, whatever is shared, preempted, evicted or lost."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.config import Batching
from pdserve.engine.request import Request
from pdserve.wire.cache_groups import GroupBlocks, Keep
from pdserve.wire.engine import FinishReason
from pdserve.wire.sampling_params import PromptLogprobs
from tests.engine.fake_engine import BLOCK_SIZE, FakeEngine
from tests.engine.fake_model import answer, groups_of, prompt_logprobs
from tests.engine.fake_transfer import NodeThread, Wire
from tests.examples import examples

pytestmark = pytest.mark.integration  # for the seconds that it takes

MAX_LEN = 44
STATES_ONLY = ((Keep.LATEST, 0), (Keep.LATEST, 0))
"""The groups of a model that has no layer which keeps whole contexts."""
GROUPS: tuple[Sequence[tuple[Keep, int]], ...] = (
    (),
    (),
    ((Keep.WINDOW, 6),),
    ((Keep.LATEST, 0),),
    ((Keep.WINDOW, 1), (Keep.LATEST, 0), (Keep.WINDOW, 13)),
    ((Keep.LATEST, 0), (Keep.WINDOW, 9), (Keep.LATEST, 0)),
    STATES_ONLY,
)
"""The keeps and windows of the groups behind group 0 that a model may have."""
TWO_NODES: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32),
    "num_blocks": st.tuples(*[st.integers(MAX_LEN // BLOCK_SIZE, 40)] * 2),
    "max_num_seqs": st.tuples(*[st.integers(1, 6)] * 2),
    "max_num_batched_tokens": st.tuples(*[st.integers(1, 24)] * 2),
    "losses": st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    "share": st.sampled_from([1.0, 0.3, 0.05]),
    "batching": st.sampled_from(Batching),
    "overlap": st.booleans(),
    "expire": st.booleans(),
    "keeps": st.sampled_from(GROUPS),
}
"""What two nodes that exchange blocks may be like, and the wire between them."""


def groups(random: Random, keeps: Sequence[tuple[Keep, int]], num_blocks: int) -> Sequence[GroupBlocks]:
    """Returns groups with random numbers of blocks, each enough for one request in the largest step at least."""
    if not keeps:
        return ()
    most = MAX_LEN // BLOCK_SIZE
    counts = [random.randint(4, 20) if keep is Keep.LATEST else random.randint(most, 2 * most) for keep, _ in keeps]
    wanted = [(*keep, count) for keep, count in zip(keeps, counts, strict=True)]
    return groups_of(wanted, num_blocks, layers=0 if keeps is STATES_ONLY else 1)


class Traffic:
    """Requests whose prompts begin alike, and the answers that they must get."""

    def __init__(self, engine: FakeEngine, random: Random, remote: bool = False, *, expire: bool = False) -> None:
        """With ``expire`` some of the requests have little time, and end in the middle of a turn."""
        self.engine = engine
        self._deadlines = Random(0) if expire else None
        self.wanted: dict[int, list[int]] = {}
        self.wanted_scores: dict[int, PromptLogprobs] = {}
        self.given_up: set[int] = set()
        self._random = random
        self._remote = remote
        self._client_requests = 0
        self._requests: dict[int | None, Request] = {}

    def arrive(self) -> None:
        """Adds a client request of up to three prompts, with up to four answers each."""
        self._client_requests += 1
        for _ in range(self._random.choice((1, 1, 1, 3))):
            self._arrive_one()

    def _arrive_one(self) -> None:
        random, engine = self._random, self.engine
        stem = [random.choice((10, 10, 20))] * random.choice((0, 7, 8, 16, 20, 24))
        prompt = [*stem, *random.choices((30, 31), k=random.randint(0 if stem else 1, 9))]
        max_tokens, seeds = random.randint(1, 20), random.sample(range(60), random.choice((1, 1, 2, 4)))
        local_id = len(self.wanted)
        salt = random.choice(("", "", "salt"))
        answers = [answer(prompt, seed, max_tokens, engine.max_len) for seed in seeds]
        # Some were begun by another node, each answer up to another token.
        resumed = random.random() < 0.3
        emitted = [tokens[: random.randint(0, len(tokens)) if resumed else 0] for tokens in answers]
        fetch_only = self._remote and random.random() < 0.1
        scored = random.random() < 0.3
        short = self._deadlines is not None and self._deadlines.random() < 0.3
        deadline_s = self._deadlines.randint(0, 30) if self._deadlines is not None and short else 10_000
        request = engine.add(
            local_id,
            prompt,
            max_tokens,
            seeds,
            salt=salt,
            remote=self._remote and random.random() < 0.8,
            group_id=self._client_requests,
            emitted=emitted,
            holders=random.choice((0, 1, 2)) if self._remote else 0,
            fetch_only=fetch_only,
            scored=scored,
            deadline_s=deadline_s,
        )
        if scored and not fetch_only and len(prompt) > 1:
            self.wanted_scores[local_id] = prompt_logprobs(prompt, range(1, len(prompt)))
        for i, (tokens, known) in enumerate(zip(answers, emitted, strict=True)):
            self.wanted[local_id + i] = [] if fetch_only else tokens[len(known) :]
            if short:
                self.given_up.add(local_id + i)
        self._requests.update((member.local_id, member) for member in (request, *request.children))

    def leave(self) -> None:
        """Lets a client give up, or its time run out."""
        local_id = self._random.choice(list(self.wanted))
        request = self._requests.get(local_id)
        if request is None or request.ended:
            return
        self.given_up.add(local_id)
        if self._random.random() < 0.5:
            self.engine.scheduler.abort(request)
        else:
            self.engine.scheduler.finish(request, FinishReason.DEADLINE)

    def check(self) -> None:
        """Checks that each client got the right answer once."""
        self.engine.collect()
        for local_id, scores in self.wanted_scores.items():
            if local_id not in self.given_up or local_id in self.engine.scores:
                assert self.engine.scores[local_id] == scores
        assert self.engine.scores.keys() <= self.wanted_scores.keys()
        for local_id, wanted in self.wanted.items():
            got = self.engine.outputs.get(local_id, [])
            if local_id in self.given_up:
                assert got == wanted[: len(got)]
            else:
                assert got == wanted
                assert self.engine.endings[local_id].finish in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("batching", Batching)
@settings(max_examples=examples(100), deadline=None)
# In a static batch the only request that has more than one token to compute finds no blocks.
@example(
    seed=10828657,
    num_blocks=17,
    max_num_seqs=5,
    max_num_batched_tokens=7,
    prefix_cache=True,
    overlap=False,
    expire=False,
    keeps=(),
)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(MAX_LEN // BLOCK_SIZE, 40),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 24),
    prefix_cache=st.booleans(),
    overlap=st.booleans(),
    expire=st.booleans(),
    keeps=st.sampled_from(GROUPS),
)
def test_every_answer_is_right_on_a_mixed_node(
    batching: Batching,
    seed: int,
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_cache: bool,
    overlap: bool,
    expire: bool,
    keeps: Sequence[tuple[Keep, int]],
) -> None:
    random = Random(seed)
    engine = FakeEngine(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_len=MAX_LEN,
        batching=batching,
        prefix_cache=prefix_cache,
        overlap=overlap and not any(keep is Keep.LATEST for keep, _ in keeps),
        groups=groups(Random(seed), keeps, num_blocks),
    )
    if seed % 2:
        engine.can_follow = lambda request: bool(request.sampling.seed % 3)
    traffic = Traffic(engine, random, expire=expire)
    for _ in range(random.randint(1, 12)):
        traffic.arrive()
        for _ in range(random.randint(0, 9)):
            engine.step()
            if random.random() < 0.1:
                traffic.leave()
    engine.run()
    traffic.check()
    assert engine.idle
    if not prefix_cache:
        assert engine.blocks.num_cached == 0


@settings(max_examples=examples(100), deadline=None)
# A resumed answer that has all of its tokens gets the log probabilities of its prompt, and then its fetch fails.
@example(
    prefix_cache=(True, True),
    seed=25477,
    num_blocks=(15, 11),
    max_num_seqs=(1, 1),
    max_num_batched_tokens=(8, 16),
    losses=0.05,
    share=0.05,
    batching=Batching.CONTINUOUS,
    overlap=False,
    expire=False,
    keeps=(),
)
@given(prefix_cache=st.tuples(st.booleans(), st.booleans()), **TWO_NODES)
def test_every_answer_is_right_on_a_prefill_and_a_decode_node(
    seed: int,
    num_blocks: tuple[int, int],
    max_num_seqs: tuple[int, int],
    max_num_batched_tokens: tuple[int, int],
    prefix_cache: tuple[bool, bool],
    losses: float,
    share: float,
    batching: Batching,
    overlap: bool,
    expire: bool,
    keeps: Sequence[tuple[Keep, int]],
) -> None:
    """``batching`` and ``overlap`` are the decode node's."""
    random = Random(seed)
    wire, back = Wire(random), Wire(random)
    threads = NodeThread(wire.decode, back.prefill), NodeThread(back.decode, wire.prefill)
    decode, prefill = (
        FakeEngine(
            thread=thread,
            num_blocks=num_blocks[i],
            max_num_seqs=max_num_seqs[i],
            max_num_batched_tokens=max_num_batched_tokens[i],
            max_len=MAX_LEN,
            prefix_cache=prefix_cache[i],
            batching=batching if i == 0 else Batching.CONTINUOUS,
            overlap=overlap and i == 0 and not any(keep is Keep.LATEST for keep, _ in keeps),
            groups=groups(Random(seed + i), keeps, num_blocks[i]),
        )
        for i, thread in enumerate(threads)
    )
    traffic = Traffic(decode, random, remote=True, expire=expire)

    def turn() -> None:
        for engine in (decode, prefill):
            engine.step()
            wire.deliver(prefill.model, decode.model, share)
            back.deliver(decode.model, prefill.model, share)
        if random.random() < losses:
            random.choice((wire, back)).lose()

    for _ in range(random.randint(1, 12)):
        traffic.arrive()
        for _ in range(random.randint(0, 9)):
            turn()
            if random.random() < 0.1:
                traffic.leave()
    for _ in range(6000):
        if decode.idle and prefill.idle:
            break
        turn()
    assert decode.idle
    assert prefill.idle
    traffic.check()


@settings(max_examples=examples(100), deadline=None)
@given(prefix_cache=st.booleans(), **TWO_NODES)
def test_every_answer_is_right_on_two_nodes_that_fetch_from_each_other(
    seed: int,
    num_blocks: tuple[int, int],
    max_num_seqs: tuple[int, int],
    max_num_batched_tokens: tuple[int, int],
    prefix_cache: bool,
    losses: float,
    share: float,
    batching: Batching,
    overlap: bool,
    expire: bool,
    keeps: Sequence[tuple[Keep, int]],
) -> None:
    """Both nodes decode and push at once, so they run out of blocks while others' prompts hold some."""
    random = Random(seed)
    wires = Wire(random), Wire(random)
    engines = [
        FakeEngine(
            thread=NodeThread(wires[i].decode, wires[1 - i].prefill),
            num_blocks=num_blocks[i],
            max_num_seqs=max_num_seqs[i],
            max_num_batched_tokens=max_num_batched_tokens[i],
            max_len=MAX_LEN,
            prefix_cache=prefix_cache,
            batching=batching,
            overlap=overlap and not any(keep is Keep.LATEST for keep, _ in keeps),
            groups=groups(Random(seed + i), keeps, num_blocks[i]),
        )
        for i in range(2)
    ]
    traffics = [Traffic(engine, random, remote=True, expire=expire) for engine in engines]

    def turn() -> None:
        for i, engine in enumerate(engines):
            engine.step()
            wires[i].deliver(engines[1 - i].model, engine.model, share)
            wires[1 - i].deliver(engine.model, engines[1 - i].model, share)
        if random.random() < losses:
            random.choice(wires).lose()

    for _ in range(random.randint(1, 12)):
        random.choice(traffics).arrive()
        for _ in range(random.randint(0, 9)):
            turn()
            if random.random() < 0.1 and (begun := [traffic for traffic in traffics if traffic.wanted]):
                random.choice(begun).leave()
    for _ in range(6000):
        if all(engine.idle for engine in engines):
            break
        turn()
    assert all(engine.idle for engine in engines)
    for traffic in traffics:
        traffic.check()
