"""Tests that an engine goes on after tokens that another one has generated, as if it had generated them itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import Dtype, KvCacheDtype
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Status
from pdserve.engine.sampling import grammar_matcher, sampler
from pdserve.grammars import compiling
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import ModelRunner
from pdserve.settings import cache_folder
from pdserve.wire.engine import FinishReason, PrefillSource
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams
from pdserve_kernels.contract import Kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels, CompiledLinear
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.engine.fake_engine import FakeEngine
from tests.engine.fake_model import answer, talkative
from tests.engine.scheduling.test_scheduler import TARGET, Bench, expected
from tests.engine.scheduling.test_scheduler_children import Pair
from tests.engine.test_launched_step import PARAMETERS
from tests.engine.test_step_loop import BLOCK_SIZE, MAX_LEN, Answer, engine, prompt
from tests.nightly import nightly
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.integration  # for the seconds that it takes

PROMPT = list(range(100, 110))
SEED = talkative(PROMPT, 40)
WHOLE = answer(PROMPT, SEED, 40, 64)

TOKENS = 40
CUT_TOKENS = 24
"""The tokens of an answer that is cut at every place: six blocks, and more than any ``min_tokens``."""
APART = 5
"""Answers that go on beside each other are cut so many tokens apart."""
NUM_BLOCKS = 200
EVERYTHING: dict[str, Any] = {
    "temperature": 1.1,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.001,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
    "logit_bias": ((7, 2.0), (9, -3.0)),
    "bad_words": ((3,), (5, 6)),
    "min_tokens": 20,
    "stop_token_ids": (11, 12),
    "logprobs": 3,
}
ITEMS = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": ["ab", "abba", 12, 1.5, null]}}')
FEATURES = PARAMETERS | {"everything": EVERYTHING, "everything in JSON": EVERYTHING | {"grammar": ITEMS}}

Asked = tuple[Sequence[int], SamplingParams, Sequence[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return make_runner(folder, Dtype.FP32, TorchKernels())


def make_runner(
    folder: Path, dtype: Dtype, kernels: Kernels, kv_dtype: KvCacheDtype = KvCacheDtype.AUTO
) -> ModelRunner:
    shape = (dtype, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN)
    return ModelRunner(folder, read_decoder_config(folder), *shape, kernels, kv_dtype=kv_dtype)


def asked(name: str, seed: int = 1, length: int = 18, max_tokens: int = TOKENS) -> Asked:
    """A request of one answer that has all of its tokens, unless a stop token ends it."""
    more = FEATURES[name]
    ignore_eos = "stop_token_ids" not in more
    return prompt(length), SamplingParams(max_tokens=max_tokens, seed=seed, **{"ignore_eos": ignore_eos} | more), ()


def check_rest(got: Answer, whole: Answer, known: int, logprobs_within: float = 1e-3) -> None:
    """Checks that an answer is what the unbroken one has after its first ``known`` tokens."""
    assert got.tokens == whole.tokens[known:]
    assert got.end.finish is whole.end.finish
    rest = whole.logprobs[known:]
    for mine, wanted in zip(got.logprobs, rest, strict=True):
        assert mine.chosen == pytest.approx(wanted.chosen, abs=logprobs_within)
        assert [logprob for _, logprob in mine.top] == pytest.approx(
            [logprob for _, logprob in wanted.top], abs=logprobs_within
        )


def only(answers: dict[int, Answer]) -> Answer:
    (answer,) = answers.values()
    return answer


# ---------------------------------------------------------------- every cut


@pytest.mark.parametrize(
    ("name", "all_cuts"), [*((name, False) for name in FEATURES), *(nightly(name, True) for name in FEATURES)]
)
def test_an_answer_goes_on_after_any_number_of_its_tokens(
    folder: Path, runner: ModelRunner, name: str, all_cuts: bool
) -> None:
    """By day, each feature has two fifths of the cuts. All features together have each cut several times."""
    number = list(FEATURES).index(name)
    starts = range(APART) if all_cuts else [number % APART, (number + 2) % APART]
    with engine(folder, False, NUM_BLOCKS, own_runner=runner) as client:
        one = asked(name, max_tokens=CUT_TOKENS)
        whole = only(client.together([one]))
        assert len(whole.tokens) > 5 or name == "stop token"
        cuts = range(len(whole.tokens) + 1)
        for several in (cuts[start::APART] for start in starts):
            # A salt of its own makes the engine a fresh one.
            emitted = [[whole.tokens[:known]] for known in several]
            answers = client.together([one] * len(several), f"{several.start}", emitted)
            for got, known in zip(answers.values(), several, strict=True):
                check_rest(got, whole, known)


@pytest.mark.parametrize(
    ("overlap", "prefix_cache", "step"),
    [
        (True, False, 26),
        (False, True, 26),
        *(nightly(overlap, prefix_cache, 13) for overlap in (False, True) for prefix_cache in (False, True)),
    ],
)
def test_answers_go_on_beside_each_other(
    folder: Path, runner: ModelRunner, overlap: bool, prefix_cache: bool, step: int
) -> None:
    """The cache finds blocks of the unbroken answers, and of those that were resumed before."""
    everything = [asked(name, seed, length=9 + 2 * seed) for seed, name in enumerate(FEATURES)]
    with engine(folder, overlap, NUM_BLOCKS, own_runner=runner, prefix_cache=prefix_cache) as client:
        whole = list(client.together(everything).values())
        for start in range(0, TOKENS, step):
            cuts = [min((start + 5 * i) % TOKENS, len(one.tokens)) for i, one in enumerate(whole)]
            emitted = [[one.tokens[:cut]] for one, cut in zip(whole, cuts, strict=True)]
            for got, one, cut in zip(client.together(everything, "", emitted).values(), whole, cuts, strict=True):
                check_rest(got, one, cut)


def test_answers_go_on_though_they_are_preempted(folder: Path) -> None:
    several = [
        asked(name, seed, length=20, max_tokens=60) for seed, name in enumerate(PARAMETERS) if "stop" not in name
    ]
    with engine(folder, False, NUM_BLOCKS) as roomy:
        whole = list(roomy.together(several).values())
    with engine(folder, False, num_blocks=40) as tight:
        got = tight.together(several, "", [[one.tokens[: 3 + 4 * i]] for i, one in enumerate(whole)])
        tight.wait_for_a_preemption()
    for i, (mine, one) in enumerate(zip(got.values(), whole, strict=True)):
        check_rest(mine, one, min(3 + 4 * i, len(one.tokens)))


@pytest.mark.parametrize("cuts_apart", [3, nightly(1)])
@pytest.mark.parametrize("kv_dtype", KvCacheDtype)
@pytest.mark.parametrize("dtype", Dtype)
def test_answers_of_the_compiled_kernels_are_bitwise_the_same(
    folder: Path, dtype: Dtype, kv_dtype: KvCacheDtype, cuts_apart: int
) -> None:
    """The set computes a row alike in any step, if the CPU has AVX2. By day, all types together have each cut."""
    compiled = CompiledKernels(cache_folder(os.environ))
    if not isinstance(compiled.linear(torch.zeros(32, 32)), CompiledLinear):
        pytest.skip("this CPU has no AVX2")
    with engine(folder, False, NUM_BLOCKS, own_runner=make_runner(folder, dtype, compiled, kv_dtype)) as client:
        one = asked("everything", max_tokens=CUT_TOKENS)
        whole = only(client.together([one]))
        first = (list(Dtype).index(dtype) + list(KvCacheDtype).index(kv_dtype)) % cuts_apart
        for known in range(first, len(whole.tokens), cuts_apart):
            got = only(client.together([one], f"{known}", [[whole.tokens[:known]]]))
            assert (got.tokens, got.logprobs) == (whole.tokens[known:], whole.logprobs[known:])


# ---------------------------------------------------------------- grammars beside the steps


@pytest.mark.parametrize("how", [nightly({}), {"temperature": 0.0}, nightly({"top_p": 0.9}), EVERYTHING], ids=str)
@pytest.mark.parametrize("heavy", ["in time", "out of time", "too heavy"])
def test_an_answer_that_waits_for_its_grammar_has_the_same_tokens(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, heavy: str, how: dict[str, Any]
) -> None:
    """It is left out of steps, alone and as one of several answers to a prompt that takes two chunks."""
    # Beside other work, what the grammar takes is not what it takes alone, and here nobody is refused for it.
    monkeypatch.setattr(grammar_matcher, "MASKS_S", 1e6)
    sampling = SamplingParams(max_tokens=TOKENS, seed=1, **how | {"grammar": ITEMS})
    family = [(prompt(length), sampling, (2, 3)) for length in (3, 21)]
    others = [asked("everything", length=9), asked("greedy", length=30)]
    with engine(folder, False, NUM_BLOCKS, own_runner=runner) as client:
        whole = client.together(family + others)
    if heavy == "out of time":
        monkeypatch.setattr(sampler, "STEP_S", -1.0)
    elif heavy == "too heavy":
        monkeypatch.setattr(compiling, "_quick", lambda *_: None)
    with engine(folder, True, NUM_BLOCKS, own_runner=runner) as client:
        again = client.together(family + others)
        resumed = client.together([family[0]], "resumed", [[one.tokens[:5] for one in list(whole.values())[:3]]])
    assert [(one.tokens, one.end.finish) for one in again.values()] == [
        (one.tokens, one.end.finish) for one in whole.values()
    ]
    for got, one in zip(resumed.values(), list(whole.values())[:3], strict=True):
        check_rest(got, one, min(5, len(one.tokens)))


# ---------------------------------------------------------------- several answers


@pytest.mark.parametrize(
    ("length", "prefix_cache"),
    # Whole blocks, and less and more than half of one.
    [(16, True), (17, True), (19, False), nightly(16, False), nightly(17, False), nightly(19, True)],
)
def test_each_answer_to_one_prompt_goes_on_after_its_own_tokens(
    folder: Path, runner: ModelRunner, length: int, prefix_cache: bool
) -> None:
    # Which of many tokens is drawn can depend on the last bit of a sum, which another batch changes; of eight, hardly.
    sampling = SamplingParams(
        max_tokens=TOKENS, seed=1, temperature=0.9, top_k=8, ignore_eos=True, frequency_penalty=0.5
    )
    family = [(prompt(length), sampling, (2, 3))]
    with engine(folder, False, NUM_BLOCKS, own_runner=runner, prefix_cache=prefix_cache) as client:
        whole = list(client.together(family).values())
        for cuts in ((0, 0, 0), (5, 0, 0), (0, 5, 9), (30, 1, 0), (1, 30, 39), (7, 7, 7), (40, 0, 3), (40, 40, 40)):
            emitted = [[one.tokens[:cut] for one, cut in zip(whole, cuts, strict=True)]]
            got = client.together(family, str(cuts), emitted)
            for mine, one, cut in zip(got.values(), whole, cuts, strict=True):
                check_rest(mine, one, cut)


def test_an_answer_without_a_token_begins_where_the_prompt_of_the_others_ends() -> None:
    engine = FakeEngine(prefix_cache=False)
    engine.add(0, PROMPT, 40, [SEED] * 2, emitted=[WHOLE[:20], ()])
    plan = engine.step()
    assert [(work.request.local_id, work.num_tokens) for work in plan.work] == [(0, 10)]
    assert engine.outputs == {1: WHOLE[:1]}
    engine.run()
    assert engine.outputs == {0: WHOLE[20:], 1: WHOLE}
    assert engine.scheduler.counters.prompt_tokens == 0, "the node before has counted it"


@pytest.mark.parametrize("num_blocks", [8, 9, 12])
def test_an_answer_for_whose_tokens_there_are_not_enough_blocks_waits(num_blocks: int) -> None:
    engine = FakeEngine(num_blocks=num_blocks, max_len=32)
    engine.add(0, PROMPT, 40, [SEED] * 2, emitted=[WHOLE[:2], WHOLE[:20]])
    engine.run()
    assert engine.outputs == {0: WHOLE[2:22], 1: WHOLE[20:22]}
    assert engine.idle


# ---------------------------------------------------------------- prefill nodes


def test_a_fetched_prompt_brings_no_first_token_to_an_answer_that_goes_on() -> None:
    pair = Pair()
    emitted = [WHOLE[:cut] for cut in (20, 0, 3)]
    parent = pair.decode.add(0, PROMPT, 40, [SEED] * 3, remote=True, emitted=emitted)
    pair.finish()
    assert pair.decode.outputs == {i: WHOLE[len(known) :] for i, known in enumerate(emitted)}
    assert parent.facts.prefill_source is PrefillSource.REMOTE
    assert pair.wire.moved == 3, "the blocks of the prompt"


def test_a_second_prefill_node_is_asked_before_any_token_is_given() -> None:
    pair = Pair()
    parent = pair.decode.add(0, PROMPT, 40, [SEED], remote=True, emitted=[WHOLE[:20]])
    # The blocks come but for the last one, and the order that they belong to fails after its first token.
    pair.turn(share=0.7)
    pair.decode.step()
    pair.wire.lose()
    pair.finish()
    assert parent.attempts == 2
    assert pair.decode.outputs == {0: WHOLE[20:]}


def test_what_a_failed_fetch_has_brought_is_no_token_of_the_answer() -> None:
    """There is room for two of them behind the prompt, in the last block that came."""
    bench = Bench()
    request = bench.add(1, prompt=10, max_tokens=30, targets=(TARGET,), emitted=20)
    assert bench.step().fetches == [request]
    bench.scheduler.requeue(request, computed_tokens=3 * BLOCK_SIZE)
    assert request.num_computed_tokens == 10
    bench.run()
    assert bench.outputs == {1: expected(30, 10)}


def test_what_has_landed_without_a_place_is_replayed_when_there_is_one() -> None:
    bench = Bench(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=8)
    resumed = bench.add(1, prompt=10, max_tokens=30, targets=(TARGET,), emitted=20)
    bench.step()
    bench.add(0, prompt=3, max_tokens=6)
    bench.step()
    bench.scheduler.landed(resumed)
    assert bench.scheduler.num_waiting == 1
    plan = bench.step()
    while resumed not in {work.request for work in plan.work}:
        plan = bench.step()
    assert [(work.request, work.num_tokens, work.replays) for work in plan.work] == [(resumed, 8, True)]
    bench.run()
    assert bench.outputs == {0: expected(3, 6), 1: expected(30, 10)}
    assert bench.blocks.num_free == 64


def test_what_has_landed_does_not_wait_behind_a_request_that_finds_no_blocks() -> None:
    bench = Bench(num_blocks=13, max_num_seqs=2)
    bench.now = 50.0
    resumed = bench.add(1, prompt=10, max_tokens=30, targets=(TARGET,), emitted=20)
    bench.step()
    for local_id, max_tokens in ((2, 3), (3, 6)):
        bench.add(local_id, prompt=3, max_tokens=max_tokens)
    bench.step()
    bench.now = 0.0
    # It came first, but the blocks of the resumed request are not to be had.
    large = bench.add(4, prompt=30)
    bench.scheduler.landed(resumed)
    while 2 not in bench.endings:
        bench.step()
    bench.step()
    assert (resumed.status, large.status) == (Status.RUNNING, Status.WAITING)
    assert 3 not in bench.endings, "there is a place, but the blocks are not free"
    bench.run()
    assert bench.outputs[1] == expected(30, 10)
    assert bench.outputs[4] == expected(30, 4)


def test_a_replay_comes_before_prompts_that_came_first() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=16)
    resumed = bench.add(1, prompt=10, max_tokens=30, targets=(TARGET,), emitted=20)
    bench.step()
    first = bench.add(2, prompt=40)
    bench.step()
    bench.scheduler.landed(resumed)
    works = [[(work.request, work.num_tokens) for work in bench.step().work] for _ in range(2)]
    assert works == [[(resumed, 16)], [(resumed, 4), (first, 12)]]


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("more", "emitted", "finish"),
    [
        ({"max_tokens": 3}, (7, 8, 9), FinishReason.LENGTH),
        ({"max_tokens": 200}, (7,) * (MAX_LEN - 9), FinishReason.LENGTH),
        ({"max_tokens": 9, "stop_token_ids": (8,)}, (7, 8), FinishReason.STOP),
        ({"max_tokens": 9}, (7, 2), FinishReason.STOP),
    ],
)
def test_tokens_that_end_the_answer_end_it_at_once(
    folder: Path, runner: ModelRunner, more: dict[str, Any], emitted: Sequence[int], finish: FinishReason
) -> None:
    with engine(folder, False, NUM_BLOCKS, own_runner=runner) as client:
        end = only(client.together([(prompt(9), SamplingParams(seed=1, **more), ())], "", [[emitted]])).end
        assert (end.new_token_ids, end.finish) == ([], finish)


@pytest.mark.parametrize(
    ("emitted", "why"),
    [
        ([(7, 8, 9, 10), ()], "at most 3 fit"),
        ([(), (7, 8, 9, 10)], "at most 3 fit"),
        ([(512,), ()], "outside 0 to 511"),
        ([(), (-1,)], "outside 0 to 511"),
    ],
)
def test_tokens_that_the_request_cannot_have_are_an_error(
    folder: Path, runner: ModelRunner, emitted: Sequence[Sequence[int]], why: str
) -> None:
    with engine(folder, False, NUM_BLOCKS, own_runner=runner) as client:
        family = [(prompt(9), SamplingParams(max_tokens=3, seed=1), (2,))]
        for got in client.together(family, "", [emitted]).values():
            assert got.end.finish is FinishReason.ERROR
            assert why in (got.end.error or "")


# ---------------------------------------------------------------- steps


def test_a_step_that_replays_is_no_measure_of_others(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[int, int]] = []

    def observe(
        cost: StepCost,
        rows: int,
        context_tokens: int,
        prompt_tokens: int,
        seconds: float,
        *,
        prompt_context: float = 0.0,
        now: float = 0.0,
    ) -> None:
        measured.append((prompt_tokens, rows))

    monkeypatch.setattr(StepCost, "observe", observe)
    with engine(folder, False, NUM_BLOCKS, own_runner=runner) as client:
        client.together([asked("greedy", max_tokens=13)], "", [[(7,) * 10]])
    assert measured == [(16, 0), (2, 0), (0, 1), (0, 1)]


def test_a_replay_is_spread_over_steps_after_those_that_decode_and_before_prompts() -> None:
    engine = FakeEngine(max_num_batched_tokens=13)
    decoding = engine.add(0, PROMPT, 40, [SEED])
    engine.step()
    resumed = engine.add(1, PROMPT, 40, [SEED], emitted=[WHOLE[:20]], salt="other")
    assert [(work.request, work.num_tokens) for work in engine.step().work] == [(decoding, 1), (resumed, 10)]
    waiting = engine.add(2, PROMPT, 40, [SEED], salt="a third")
    plan = engine.step()
    assert [(work.request, work.num_tokens, work.replays) for work in plan.work] == [
        (decoding, 1, False),
        (resumed, 12, True),
    ]
    plan = engine.step()
    assert [(work.request, work.num_tokens) for work in plan.work] == [(decoding, 1), (resumed, 8), (waiting, 4)]
    assert engine.outputs[1] == WHOLE[20:21]
    assert (plan.replays, plan.num_prompt_tokens, plan.num_decoding) == (True, 4, 1)
    engine.run()
    assert engine.outputs == {0: WHOLE, 1: WHOLE[20:], 2: WHOLE}
    assert engine.idle


def test_an_answer_that_this_engine_has_kept_is_not_replayed_again() -> None:
    engine = FakeEngine()
    engine.add(0, PROMPT, 40, [SEED])
    engine.run()
    resumed = engine.add(1, PROMPT, 40, [SEED], emitted=[WHOLE[:20]])
    (work,) = engine.step().work
    # Seven full blocks of thirty tokens are found.
    assert work.num_tokens == 2
    assert resumed.facts.cached_tokens == len(PROMPT), "what is reported counts no token of the answer"
    engine.run()
    assert engine.outputs[1] == WHOLE[20:]
