"""Tests steps that are launched before the tokens of the ones before them are known."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from pdserve.config import (
    CacheConfig,
    CpuConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    Overlap,
    ParallelConfig,
    SchedulerConfig,
    Speculate,
    TransferConfig,
)
from pdserve.engine import step_loop
from pdserve.engine.assembly import CPU_WARM_UP_TOKENS, overlaps, warm_up_tokens
from pdserve.engine.launched_step import LaunchedStep, StepAhead, decodes_on
from pdserve.engine.request import Request
from pdserve.engine.sampling import pending_tokens, sampler, sampling_row
from pdserve.engine.sampling.pending_tokens import KNOWN, DeviceTokens, HostTokens, sample_later
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.liveness import LifeSign
from pdserve.models.runner import ModelRunner
from pdserve.settings import cache_folder
from pdserve.wire.discovery import Role
from pdserve.wire.engine import FinishReason
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams
from pdserve_kernels.host_copies import HostCopy
from tests.engine.fake_engine import FakeEngine
from tests.engine.fake_model import answer, talkative
from tests.engine.fake_transfer import Wire
from tests.engine.test_step_loop import SMALL_STEPS, Answer, Client, engine, prompt
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.tiny_vocabulary import FIRST_BYTE

PROMPT = list(range(100, 110))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


# ---------------------------------------------------------------- what is launched ahead


def test_all_steps_but_the_first_are_launched_ahead() -> None:
    engine = FakeEngine(overlap=True)
    seed = talkative(PROMPT, 9)
    engine.add(0, PROMPT, 9, [seed])
    engine.run()
    assert engine.outputs == {0: answer(PROMPT, seed, 9, 64)}
    assert engine.num_ahead == 8


def test_a_long_prompt_is_computed_in_steps_ahead() -> None:
    engine, long = FakeEngine(overlap=True), list(range(100, 150))
    engine.add(0, long, 3, [talkative(long, 3)])
    assert [len(engine.step().work), engine.num_ahead] == [1, 1]
    engine.run()
    assert engine.outputs == {0: answer(long, talkative(long, 3), 3, 64)}
    # Four chunks of at most 16 tokens, and two more tokens.
    assert engine.num_ahead == 5


def test_a_request_that_comes_joins_the_next_step_that_is_launched() -> None:
    engine = FakeEngine(overlap=True, max_num_seqs=2)
    engine.add(0, PROMPT, 30, [talkative(PROMPT, 30)])
    for _ in range(4):
        engine.step()
    assert engine.num_ahead == 4
    other = [50] * 10
    engine.add(1, other, 9, [talkative(other, 9)])
    # One step was launched before it came, and the next one has its prompt.
    assert [len(engine.step().work), len(engine.step().work), engine.num_ahead] == [1, 2, 6]
    # No place is left for this one, and no step is kept waiting by it.
    third = [60] * 10
    engine.add(2, third, 3, [talkative(third, 3)])
    steps = 6
    while 2 not in engine.endings:
        engine.step()
        steps += 1
    assert engine.num_ahead == steps
    engine.run()
    assert engine.outputs == {
        0: answer(PROMPT, talkative(PROMPT, 30), 30, 64),
        1: answer(other, talkative(other, 9), 9, 64),
        2: answer(third, talkative(third, 3), 3, 64),
    }


def test_a_request_that_needs_its_last_token_is_in_every_other_step() -> None:
    engine = FakeEngine(overlap=True, max_num_batched_tokens=64)
    for client in range(3):
        engine.add(client, PROMPT, 20, [talkative(PROMPT, 20)])
    slow = engine.scheduler.find(0)
    engine.can_follow = lambda request: request is not slow
    engine.step()
    assert [len(engine.step().work) for _ in range(4)] == [2, 3, 2, 3]
    # Once it is alone, nobody gains by its waiting.
    engine.run()
    assert engine.outputs == {client: answer(PROMPT, talkative(PROMPT, 20), 20, 64) for client in range(3)}


def test_those_that_need_their_last_tokens_wait_for_no_others_if_they_are_the_most() -> None:
    engine = FakeEngine(overlap=True, max_num_batched_tokens=64)
    for client in range(3):
        engine.add(client, PROMPT, 20, [talkative(PROMPT, 20)])
    quick = engine.scheduler.find(0)
    engine.can_follow = lambda request: request is quick
    for _ in range(4):
        engine.step()
    assert engine.num_ahead == 0
    engine.run()
    assert engine.outputs == {client: answer(PROMPT, talkative(PROMPT, 20), 20, 64) for client in range(3)}


def test_a_client_that_leaves_a_prompt_that_was_launched_ahead_leaves_nothing() -> None:
    engine, long = FakeEngine(overlap=True), list(range(100, 150))
    request = engine.add(0, long, 3, [talkative(long, 3)])
    engine.add(1, PROMPT, 9, [talkative(PROMPT, 9)])
    engine.step()
    engine.scheduler.abort(request)
    assert request not in [work.request for work in engine.step().work]
    engine.run()
    assert engine.outputs[1] == answer(PROMPT, talkative(PROMPT, 9), 9, 64)
    assert engine.idle


def test_nothing_is_launched_ahead_for_blocks_that_are_not_free() -> None:
    engine = FakeEngine(overlap=True, num_blocks=8, prefix_cache=False)
    for client in range(2):
        engine.add(client, PROMPT, 12, [talkative(PROMPT, 12)])
    engine.run()
    assert engine.outputs == {client: answer(PROMPT, talkative(PROMPT, 12), 12, 64) for client in range(2)}
    assert engine.scheduler.counters.preemptions > 0
    assert engine.idle


def test_a_step_ahead_takes_no_block_into_which_a_copy_is_pending() -> None:
    """A prompt lands and its child is to have a copy of its last block, and both end in that same turn."""
    wire = Wire(Random(0))
    decode, prefill = FakeEngine(thread=wire.decode, overlap=True, num_blocks=9), FakeEngine(thread=wire.prefill)
    seeds, other = [talkative(PROMPT, 9), talkative(PROMPT, 30)], [50] * 10
    decode.add(0, other, 25, [talkative(other, 25)])
    for _ in range(4):
        decode.step()
    parent = decode.add(1, PROMPT, 9, seeds, remote=True)
    (child,) = parent.children
    prefill_steps = 0
    while not child.num_generated_tokens:
        decode.step()
        prefill.step()
        prefill_steps += 1
        assert prefill_steps < 20
    wire.deliver(prefill.model, decode.model, 1.0)
    parent.deadline = child.deadline = decode.now + 1
    before = decode.num_ahead
    decode.step()
    assert decode.num_ahead == before + 1, "the prompt has landed and left again, and nobody else came"
    assert {decode.endings[i].finish for i in (1, 2)} == {FinishReason.DEADLINE}
    for _ in range(9):
        decode.step()
    # Another request ends the chain of steps ahead, and the next plan has whatever copies are still to be made.
    decode.add(3, [60] * 3, 2, [talkative([60] * 3, 2)])
    decode.run()
    assert decode.outputs[0] == answer(other, talkative(other, 25), 25, 64)
    assert decode.idle


# ---------------------------------------------------------------- the loop


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects ``launch`` and ``read`` in the order in which the loop does them."""
    log: list[str] = []

    def logged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def log_and_call(*args: Any) -> Any:
            log.append(name)
            return call(*args)

        return log_and_call

    monkeypatch.setattr(ModelRunner, "run", logged("launch", ModelRunner.run))
    for kind in (DeviceTokens, HostTokens):
        monkeypatch.setattr(kind, "read", logged("read", kind.read))
    return log


PLAIN = replace(SMALL_STEPS, speculation=Speculate.OFF)
"""Steps without drafts: a step that may have some waits for the one before it."""


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True, **more)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(folder: Path, log: list[str]) -> None:
    with engine(folder, overlap=True, scheduler=PLAIN) as client:
        client.together([(prompt(9), greedy(6), [])])
    assert log == ["launch", *["launch", "read"] * 5, "read"]


def test_a_request_that_needs_its_last_token_waits_for_it(folder: Path, log: list[str]) -> None:
    with engine(folder, overlap=True, scheduler=PLAIN) as client:
        client.together([(prompt(9), greedy(6, bad_words=((5, 6),)), [])])
    assert log == ["launch", "read"] * 6


def test_each_step_has_time_before_its_engine_counts_as_hung(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch may compile kernels, also that of a step ahead, while the step under way is still to be waited for."""
    shown, at_launch = [0], list[int]()
    run = ModelRunner.run

    class Sign(LifeSign):
        def show(self, busy_s: float = 0.0) -> None:
            shown[0] += 1

    def run_and_note(*args: Any) -> torch.Tensor:
        # The time that one launch was given is not the next one's.
        at_launch.append(shown[0])
        shown[0] = 0
        return run(*args)

    monkeypatch.setattr(step_loop, "unseen_sign", lambda: Sign(memoryview(bytearray(64)).cast("d"), 0))
    monkeypatch.setattr(ModelRunner, "run", run_and_note)
    with engine(folder, overlap=True, scheduler=PLAIN) as client:
        client.together([(prompt(40), greedy(6), []), (prompt(9), greedy(6), [])])
    assert len(at_launch) > 6
    assert min(at_launch) > 0


def test_nearly_all_steps_of_a_saturated_engine_are_launched_ahead(folder: Path) -> None:
    """Prompts of several chunks come all the time, more than have places, and one of them needs its tokens."""
    rng = Random(5)
    asked: list[tuple[list[int], SamplingParams, Sequence[int]]] = [
        (prompt(rng.randint(3, 40)), greedy(rng.randint(5, 30), bad_words=((5, 6),) * (i == 0)), []) for i in range(40)
    ]
    with engine(folder, overlap=False, num_blocks=150) as one_after_another:
        wanted = one_after_another.together(asked)
    with engine(folder, overlap=True, num_blocks=150, scheduler=PLAIN) as client:
        got = client.together(asked)
        stats = client.stats_asked_for(1)
    assert [answer.tokens for answer in got.values()] == [answer.tokens for answer in wanted.values()]
    assert stats.steps > 100
    assert stats.steps_ahead >= 0.95 * stats.steps


@pytest.mark.parametrize(
    "name", ["presence", "frequency", "repetition", "bias", "allowed", "bad word", "min tokens", "logprobs", "named"]
)
def test_a_rule_or_a_report_keeps_no_step_waiting(folder: Path, log: list[str], name: str) -> None:
    with engine(folder, overlap=True, scheduler=PLAIN) as client:
        own = PARAMETERS[name] | {"ignore_eos": True, "stop_token_ids": ()}
        client.together([(prompt(9), SamplingParams(max_tokens=6, seed=0, **own), [])])
    assert log == ["launch", *["launch", "read"] * 5, "read"]


def test_one_after_another_without_it(folder: Path, log: list[str]) -> None:
    with engine(folder, overlap=False) as client:
        client.together([(prompt(9), greedy(6), [])])
    assert log == ["launch", "read"] * 6


def test_tokens_that_arrive_late_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is slower than the host, tokens can be read only once the next step was launched."""
    launched, arrived = 0, 0

    class Late(HostCopy):
        def __init__(self, values: torch.Tensor) -> None:
            nonlocal launched
            launched += 1
            self._number = launched
            super().__init__(values)

        def read(self) -> torch.Tensor:
            nonlocal arrived
            arrived += launched > self._number
            return super().read()

    asked: list[tuple[list[int], SamplingParams, Sequence[int]]] = [
        (prompt(9 + i), SamplingParams(max_tokens=20 + i, seed=i, temperature=0.9), []) for i in range(3)
    ]
    with engine(folder, overlap=False) as client:
        wanted = client.together(asked)
    monkeypatch.setattr(pending_tokens, "HostCopy", Late)
    with engine(folder, overlap=True, scheduler=PLAIN) as client:
        got = client.together(asked)
    assert [answer.tokens for answer in got.values()] == [answer.tokens for answer in wanted.values()]
    assert arrived > 10


A = FIRST_BYTE + ord("a")
MOSTLY: dict[str, Any] = {
    "temperature": 1.0,
    "grammar": Grammar(GrammarKind.REGEX, "[a-f,]*"),
    "logit_bias": (*((FIRST_BYTE + ord(letter), 12.0) for letter in "abcdef,"), (FIRST_BYTE + ord("z"), 11.5)),
    "logprobs": 2,
}
"""The grammar refuses about every tenth of the tokens that are chosen by these parameters."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9},
    "top-k": {"temperature": 1.2, "top_k": 7},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.9, "frequency_penalty": 0.7},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "bias": {"temperature": 0.0, "logit_bias": ((7, 50.0),)},
    "allowed": {"temperature": 0.9, "allowed_token_ids": (5, 6, 7, 8)},
    "bad word": {"temperature": 0.0, "bad_words": ((3,), (7,))},
    "bad words": {"temperature": 0.0, "bad_words": ((3,), (5, 6))},
    "min tokens": {"temperature": 0.9, "min_tokens": 8, "stop_token_ids": tuple(range(3, 250))},
    "stop token": {"temperature": 0.9, "stop_token_ids": tuple(range(3, 60))},
    "logprobs": {"temperature": 0.9, "logprobs": 3},
    "named": {"temperature": 0.9, "logprobs": 1, "logprob_token_ids": (9, 3, 200)},
    "grammar": {"temperature": 0.9, "grammar": Grammar(GrammarKind.REGEX, "([a-f]{1,4},)*")},
    "grammar, mostly followed": MOSTLY,
    "greedy grammar": MOSTLY | {"temperature": 0.0, "frequency_penalty": 0.02},
    "grammar, top-p": MOSTLY | {"top_p": 0.8},
}


def everything(client: Client, names: Sequence[str]) -> dict[int, Answer]:
    """Requests with each of these parameters, some of them with children, are in one batch."""
    asked: list[tuple[list[int], SamplingParams, Sequence[int]]] = [
        (prompt(3 + 5 * i), SamplingParams(max_tokens=12 + 3 * i, seed=i, **PARAMETERS[name]), range(90, 90 + i % 3))
        for i, name in enumerate(names)
    ]
    return client.together(asked)


@pytest.mark.parametrize(
    "names",
    [["greedy", "drawn", "top-k", "top-p", "min-p", "stop token"], list(PARAMETERS), *([name] for name in PARAMETERS)],
    ids=["what is launched ahead", "everything at once", *PARAMETERS],
)
def test_whatever_is_asked_for_is_answered_alike(folder: Path, names: list[str]) -> None:
    with engine(folder, overlap=False, num_blocks=150) as one_after_another:
        wanted = everything(one_after_another, names)
    with engine(folder, overlap=True, num_blocks=150) as ahead:
        got = everything(ahead, names)
    for i, mine in got.items():
        assert (mine.tokens, mine.end.finish) == (wanted[i].tokens, wanted[i].end.finish)
        # They come from other batches, and are rounded otherwise.
        for a, b in zip(mine.logprobs, wanted[i].logprobs, strict=True):
            assert a.chosen == pytest.approx(b.chosen, abs=1e-3)
            assert [logprob for _, logprob in a.top] == pytest.approx([logprob for _, logprob in b.top], abs=1e-3)


@pytest.mark.parametrize("grammar", ["a{1,99}", "(?s:[^b])*"])
def test_a_grammar_that_is_followed_keeps_no_step_waiting(folder: Path, log: list[str], grammar: str) -> None:
    (tokens,) = likely_a(folder, grammar)
    assert tokens == [A] * 6
    assert log == ["launch", *["launch", "read"] * 5, "read"]


def test_one_step_is_launched_ahead_in_vain_for_a_grammar_that_is_never_followed(folder: Path, log: list[str]) -> None:
    (tokens,) = likely_a(folder, "[xyz]{9}")
    assert len(tokens) == 6
    assert A not in tokens
    assert log == ["launch", "launch", "read", "read", *["launch", "read"] * 5]


def likely_a(folder: Path, grammar: str) -> list[list[int]]:
    """Returns the answer, of six tokens, of a model that writes nothing but "a", with this grammar."""
    how = SamplingParams(
        max_tokens=6, seed=0, temperature=0.0, logit_bias=((A, 50.0),), grammar=Grammar(GrammarKind.REGEX, grammar)
    )
    with engine(folder, overlap=True, scheduler=PLAIN) as client:
        return [answer.tokens for answer in client.together([(prompt(9), how, [])]).values()]


@pytest.fixture
def shared_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every step write its logits where those of the step before are, as recorded steps do."""
    run, logits = ModelRunner.run, torch.empty(64, VOCAB_SIZE)

    def run_into_the_same(*args: Any, **more: Any) -> torch.Tensor:
        computed = run(*args, **more)
        return logits[: len(computed)].copy_(computed)

    monkeypatch.setattr(ModelRunner, "run", run_into_the_same)


@pytest.mark.usefixtures("shared_logits")
@pytest.mark.parametrize("step_s", [sampler.STEP_S, 1e-9], ids=["asked in the step", "waiting"])
def test_refused_tokens_change_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Some requests have children, some are preempted, and some end while a step is under way."""
    num_launched, num_dropped, num_preempted = 0, 0, 0
    expired, join = Scheduler.expired, StepAhead.joined
    doomed: dict[int, int] = {}

    def expired_and_doomed(scheduler: Scheduler, now: float) -> list[Request]:
        live = [(request, limit) for number, limit in doomed.items() if (request := scheduler.find(number)) is not None]
        return expired(scheduler, now) + [request for request, limit in live if request.num_generated_tokens >= limit]

    def joined(ahead: StepAhead) -> LaunchedStep:
        nonlocal num_launched, num_dropped
        step = join(ahead)
        num_launched += 1
        num_dropped += sum(decodes_on(request) for request in ahead.step.requests) - len(step.rows)
        return step

    for seed in range(6):
        rng = Random(seed)
        asked = some_with_grammars(rng)
        with engine(folder, overlap=False) as client:
            wanted = client.together(asked)
        doomed = {number: rng.randint(1, 15) for number in rng.sample(sorted(wanted), k=1)}
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "STEP_S", step_s)
            patch.setattr(Scheduler, "expired", expired_and_doomed)
            patch.setattr(StepAhead, "joined", joined)
            with engine(folder, overlap=True, num_blocks=11 if seed % 2 else 30) as client:
                got = client.together(asked)
                num_preempted += client.stats_asked_for(1).scheduler.preemptions
        for number, right in wanted.items():
            mine, ends_early = got[number], got[number].end.finish is FinishReason.DEADLINE
            assert mine.tokens == (right.tokens[: len(mine.tokens)] if ends_early else right.tokens)
            assert mine.end.finish == right.end.finish or (ends_early and number in doomed)
            for a, b in zip(mine.logprobs, right.logprobs, strict=not ends_early):
                assert a.chosen == pytest.approx(b.chosen, abs=1e-3)
                assert a.rank == b.rank
    assert num_launched > 20
    assert num_dropped > 3
    assert num_preempted > 0


def some_with_grammars(rng: Random) -> list[tuple[list[int], SamplingParams, Sequence[int]]]:
    """Returns prompts with parameters and seeds of children. No answer is too long for eleven blocks."""
    kinds = ["drawn", *(name for name in PARAMETERS if "grammar" in name)]
    return [
        (
            prompt(rng.randint(3, 20)),
            SamplingParams(max_tokens=rng.randint(12, 22), seed=rng.randint(0, 99), **PARAMETERS[name]),
            range(90, 90 + rng.choice([0, 0, 1])),
        )
        for name in ["grammar, mostly followed", "greedy grammar", rng.choice(kinds)]
    ]


ON_DEVICE = [name for name in PARAMETERS if "grammar" not in name and name != "bad words"]
EOS = frozenset({2})


def rows_with_answers(answers: Sequence[Sequence[int]], unknown: int) -> list[SamplingRow]:
    """Returns rows of each kind, with answers to a prompt of 1 and 8, whose last ``unknown`` tokens are not known."""
    rows = []
    for i, tokens in enumerate(answers):
        name = ON_DEVICE[i % len(ON_DEVICE)]
        sampling = SamplingParams(max_tokens=9, seed=i, **PARAMETERS[name])
        rows.append(SamplingRow(sampling, [1, 8, *tokens[: len(tokens) - unknown]], 2, unknown))
    return rows


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("unknown", [0, 1])
@pytest.mark.parametrize("at_once", [1, 2**20])
def test_tokens_sampled_on_the_device_are_those_of_the_sampler(
    monkeypatch: pytest.MonkeyPatch, seed: int, unknown: int, at_once: int
) -> None:
    monkeypatch.setattr(sampling_row, "CPU_LOGITS_AT_ONCE", at_once)
    torch.manual_seed(seed)
    # So few different tokens are in answers that the last one has often occurred before.
    answers = [torch.randint(0, 9, (1 + i % 7,)).tolist() for i in range(3 * len(ON_DEVICE))]
    last = torch.tensor([answer[-1] for answer in answers])
    logits = (torch.randn(2 * len(answers), VOCAB_SIZE) * 5).bfloat16().float()
    logits[3, 7], logits[6, 8], logits[9] = float("nan"), float("inf"), float("-inf")
    sources = torch.randint(0, 2 * len(answers), (len(answers),)).tolist() if seed else range(len(answers))
    rows = rows_with_answers(answers, unknown)
    device = DeviceTokens(logits, rows, sources, EOS, last if unknown else None)
    known = HostTokens(logits, rows_with_answers(answers, 0), sources, EOS).read()
    assert device.read() == known
    assert known == sample(logits[list(sources)], rows_with_answers(answers, 0), EOS)
    # The next step takes these tokens as they are.
    assert int(device.tokens.min()) >= 0
    assert int(device.tokens.max()) < VOCAB_SIZE


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("asked", ["all", "some"])
def test_rows_that_need_their_last_tokens_keep_no_others_from_the_device(
    monkeypatch: pytest.MonkeyPatch, seed: int, asked: str
) -> None:
    """Some rows' last tokens are on the device only, and others' are known; some are sampled when they are read."""
    monkeypatch.setattr(
        pending_tokens,
        "can_sample_on_device",
        lambda row: row.sampling.bad_words != PARAMETERS["bad words"]["bad_words"],
    )
    rng = Random(seed)
    torch.manual_seed(seed)
    names = [*ON_DEVICE, "bad words"]
    rows, known, last = list[SamplingRow](), list[SamplingRow](), list[int]()
    for i in range(40):
        name, tokens = rng.choice(names), [rng.randint(0, 8) for _ in range(rng.randint(1, 7))]
        sampling = SamplingParams(max_tokens=9, seed=i, **PARAMETERS[name])
        unknown = name != "bad words" and rng.random() < 0.5
        known.append(SamplingRow(sampling, [1, 8, *tokens], 2))
        rows.append(SamplingRow(sampling, [1, 8, *tokens[:-1]], 2, 1) if unknown else known[-1])
        last.append(tokens[-1] if unknown else KNOWN)
    logits = (torch.randn(40, VOCAB_SIZE) * 5).bfloat16().float()
    sources = [rng.randrange(40) for _ in rows]
    wanted = sample(logits[sources], known, EOS)
    pending = sample_later(logits, rows, sources, EOS, torch.tensor(last))
    assert pending.late
    assert pending.tokens is not None
    on_device = [row for row in range(40) if row not in pending.late]
    tokens = pending.tokens[pending.places(on_device)].tolist()
    assert tokens == [token.token_id for row in on_device if (token := wanted[row]) is not None]
    pending.keep()
    logits.fill_(float("nan"))
    numbers = None if asked == "all" else rng.sample(range(40), 15)
    assert pending.read(numbers) == [wanted[row] for row in numbers or range(40)]
    assert not pending.refused


# ---------------------------------------------------------------- where


@pytest.mark.parametrize(
    ("asked", "device", "role", "has_peers", "tp", "wanted"),
    [
        (Overlap.AUTO, "cuda", Role.MIXED, False, 1, True),
        (Overlap.AUTO, "cpu", Role.MIXED, False, 1, False),
        (Overlap.ON, "cpu", Role.MIXED, False, 1, True),
        (Overlap.OFF, "cuda", Role.MIXED, False, 1, False),
        # A transfer may write to blocks that a surplus row still writes to, unless they come through host memory.
        (Overlap.ON, "cpu", Role.MIXED, True, 1, False),
        (Overlap.AUTO, "cuda", Role.MIXED, True, 1, True),
        (Overlap.ON, "cpu", Role.DECODE, True, 1, False),
        (Overlap.ON, "cpu", Role.DECODE, False, 1, True),
        (Overlap.AUTO, "cuda", Role.DECODE, True, 1, True),
        (Overlap.AUTO, "cuda", Role.DECODE, True, 2, False),
        (Overlap.ON, "cpu", Role.PREFILL, True, 1, False),
        # It may become a decode node.
        (Overlap.AUTO, "cuda", Role.PREFILL, True, 1, True),
        # The other ranks are told tokens by the host.
        (Overlap.AUTO, "cuda", Role.MIXED, False, 2, False),
    ],
)
def test_where_steps_are_launched_ahead(
    asked: Overlap, device: str, role: Role, has_peers: bool, tp: int, wanted: bool
) -> None:
    config = EngineConfig(
        role=role,
        boot_id=bytes(16),
        secret=b"",
        model_dir="",
        cache_dir=str(cache_folder(os.environ)),
        model=ModelConfig(),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(overlap=asked),
        transfer=TransferConfig(),
        cpu=CpuConfig(),
        log=LogConfig(),
        parallel=ParallelConfig(tensor_parallel_size=tp),
        has_peers=has_peers,
    )
    assert overlaps(config, torch.device(device)) is wanted


def test_a_gpu_is_warmed_up_with_as_long_a_prompt_as_a_step_allows_and_a_cpu_with_a_short_one() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert warm_up_tokens(256, 8192, gpu) == 256
    assert warm_up_tokens(256, 100, gpu) == 99, "the next token needs its place, too"
    assert warm_up_tokens(256, 8192, cpu) == CPU_WARM_UP_TOKENS < 256
    assert warm_up_tokens(256, 9, cpu) == 8
