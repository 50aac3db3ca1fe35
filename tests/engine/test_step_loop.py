"""Tests the step loop with a tiny random model: shared and copied blocks give the tokens that computed ones give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from pdserve.config import Dtype, SchedulerConfig
from pdserve.engine import step_loop
from pdserve.engine.api_channel import ApiChannel, WakeUp
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.prefix_cache import Match, extend_hashes
from pdserve.engine.kv_connector import KvConnector
from pdserve.engine.kv_connector.connector import NoTransferConnector
from pdserve.engine.launched_step import StepRunner
from pdserve.engine.placement.placement import Placement
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.engine.sampling.grammar_opener import GrammarOpener
from pdserve.engine.scheduling.request_limits import PromptRule, StopRule
from pdserve.engine.speculation.draft_model import DraftModel
from pdserve.engine.step_loop import NOT_FINITE, StepLoop
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.layer_groups import layer_groups
from pdserve.models.runner import ModelRunner
from pdserve.wire.engine import (
    AskStats,
    ChildRequest,
    EngineStats,
    FinishReason,
    FromEngine,
    RequestOutput,
    Shutdown,
    Stats,
    StepOutput,
    Submit,
    ToEngine,
)
from pdserve.wire.ids import new_id
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams, TokenLogprobs
from pdserve.wire.terms import PrefillTarget
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.engine.placements import make_placement
from tests.eventually import eventually
from tests.models.tiny_families import save_tiny
from tests.terms import PREPARE, made_terms
from tests.tiny_models import VOCAB_SIZE, random_prompt, save_tiny_model
from tests.tiny_vocabulary import tiny_vocabulary

BLOCK_SIZE = 4
MAX_LEN = 128
PATIENCE_MS = 120_000
SMALL_STEPS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16)


@dataclass
class Answer:
    """The output that came for one request."""

    outputs: list[RequestOutput] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        assert not self.ended, "a request was told something after its end"
        self.outputs.append(output)

    @property
    def ended(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish is not None

    @property
    def end(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.new_token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [logprobs for output in self.outputs for logprobs in output.logprobs or []]


class TurnsChannel(ApiChannel):
    """A channel that gives the engine what is sent under ``lock`` all at once."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        super().__init__(context, address)
        self.lock = threading.Lock()

    def receive(self) -> list[ToEngine]:
        with self.lock:
            return super().receive()


class Client:
    """The API process's end of one step loop."""

    def __init__(
        self, runner: ModelRunner, blocks: BlockManager, socket: zmq.Socket[bytes], lock: threading.Lock
    ) -> None:
        """What is sent under ``lock`` arrives at once."""
        self._lock = lock
        self.runner = runner
        self.blocks = blocks
        self.targets: tuple[PrefillTarget, ...] = ()
        """The prefill engines that may be asked."""
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._next = 1
        self.preemptions = 0
        """The statistics that the engine has sent last."""
        self.crossings = 0
        """The number of messages with tokens, of all requests together."""

    def send(self, message: Submit | AskStats | Shutdown) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def stats_asked_for(self, number: int) -> EngineStats:
        """Returns the stats that answer the question ``number``."""
        self.send(AskStats(number))
        while True:
            assert self._socket.poll(PATIENCE_MS), "the engine says nothing"
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, Stats) and message.asked == number:
                return message.stats

    def ask(self, prompt: Sequence[int], seeds: Sequence[int], salt: str = "", max_tokens: int = 10) -> list[list[int]]:
        """Returns the answer of each seed."""
        ends = self.finished(prompt, seeds, salt, max_tokens)
        assert {end.finish for end, _ in ends} == {FinishReason.LENGTH}
        return [tokens for _, tokens in ends]

    def finished(
        self, prompt: Sequence[int], seeds: Sequence[int], salt: str = "", max_tokens: int = 10
    ) -> list[tuple[RequestOutput, list[int]]]:
        """Returns the last output of each seed, and all tokens."""
        ids = range(self._next, self._next + len(seeds))
        sampling = SamplingParams(max_tokens=max_tokens, seed=seeds[0], temperature=0.9, ignore_eos=True)
        answers = self.together([(prompt, sampling, seeds[1:])], salt)
        return [(answers[i].end, answers[i].tokens) for i in ids]

    def wait_for_a_preemption(self) -> None:
        """Waits until the engine has reported a preemption, which it does at the latest when it is idle."""
        while not self.preemptions:
            assert self._socket.poll(PATIENCE_MS), "no request was preempted"
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, Stats):
                self.preemptions = message.stats.scheduler.preemptions

    def together(
        self,
        asked: Sequence[tuple[Sequence[int], SamplingParams, Sequence[int]]],
        salt: str = "",
        emitted: Sequence[Sequence[Sequence[int]]] = (),
        *,
        fetch_only: bool = False,
        deadline_s: float = 60.0,
    ) -> dict[int, Answer]:
        """Returns the answers by local id to prompts that come at once, each with parameters and seeds of children.

        ``emitted`` has, for each prompt, the tokens of each answer that the client has from another node.
        """
        answers: dict[int, Answer] = {}
        submits: list[Submit] = []
        known = emitted or [[()] * (1 + len(seeds)) for _, _, seeds in asked]
        for (prompt, sampling, seeds), (own, *others) in zip(asked, known, strict=True):
            ids = range(self._next, self._next + 1 + len(seeds))
            self._next += len(ids)
            answers.update((i, Answer()) for i in ids)
            children = tuple(
                ChildRequest(i, seed, tuple(tokens)) for i, seed, tokens in zip(ids[1:], seeds, others, strict=True)
            )
            submits.append(
                Submit(
                    local_id=ids[0],
                    uuid=new_id(),
                    token_ids=list(prompt),
                    sampling=sampling,
                    children=children,
                    emitted=tuple(own),
                    terms=made_terms(
                        deadline_s,
                        prefill=self.targets,
                        cache_salt=salt,
                        resume=PREPARE if fetch_only else None,
                    ),
                )
            )
        with self._lock:
            for submit in submits:
                self.send(submit)
        while not all(answer.ended for answer in answers.values()):
            assert self._socket.poll(PATIENCE_MS), "the engine says nothing"
            message = self._decoder.decode(self._socket.recv())
            assert isinstance(message, StepOutput | Stats)
            if isinstance(message, Stats):
                self.preemptions = message.stats.scheduler.preemptions
                continue
            self.crossings += 1
            for output in message.outputs:
                answers[output.local_id].add(output)
        return answers


@contextmanager
def engine(
    folder: Path,
    overlap: bool,
    num_blocks: int = 64,
    several_ranks: StepRunner | None = None,
    connect: Callable[[ModelRunner, BlockManager, WakeUp], KvConnector] | None = None,
    own_runner: ModelRunner | None = None,
    prefix_cache: bool = True,
    placement: Placement | None = None,
    give_back: Callable[[], object] | None = None,
    scheduler: SchedulerConfig = SMALL_STEPS,
    drafts: bool = False,
    draft_model: DraftModel | None = None,
    max_len: int = MAX_LEN,
) -> Iterator[Client]:
    """Runs a mixed node's engine, or one with the connector of ``connect``, on the CPU or with an ``own_runner``.

    ``drafts`` has the model draft tokens after its steps, and ``draft_model`` does it instead. ``max_len`` is the
    longest context in tokens.
    """
    config = read_decoder_config(folder)
    bounded = [num_blocks] * (len(layer_groups(config).groups) - 1)
    runner = own_runner or ModelRunner(
        folder, config, Dtype.FP32, BLOCK_SIZE, num_blocks, max_len, TorchKernels(), bounded=bounded, drafts=drafts
    )
    whole, *others = runner.cache.groups
    blocks = BlockManager(
        num_blocks, BLOCK_SIZE, prefix_cache=prefix_cache, bounded=others, block_bytes=whole.block_bytes
    )
    with zmq.Context() as context:
        socket = context.socket(zmq.PAIR)
        socket.bind("inproc://engine")
        channel, wake_up = TurnsChannel(context, "inproc://engine"), WakeUp()
        connector = NoTransferConnector(blocks) if connect is None else connect(runner, blocks, wake_up)
        ahead = runner if overlap and not runner.cache.states else None
        loop = StepLoop(
            api=channel,
            wake_up=wake_up,
            runner=several_ranks or runner,
            blocks=blocks,
            connector=connector,
            config=scheduler,
            stop=StopRule(frozenset(config.eos_token_ids), max_len),
            prompts=PromptRule(VOCAB_SIZE, max_len),
            placement=placement or make_placement(BLOCK_SIZE),
            ahead_runner=ahead,
            ahead_drafter=ahead if drafts else None,
            drafter=runner if drafts else None,
            draft_model=draft_model,
            grammars=GrammarOpener(lambda: tiny_vocabulary(folder), wake_up.set),
            give_back=give_back,
        )

        def run() -> None:
            # The model is tiny, and threads that wait for each other are slow on a busy machine.
            torch.set_num_threads(1)
            loop.run()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            client = Client(runner, blocks, socket, channel.lock)
            yield client
            # A transfer that broke off gives its blocks back when its link is closed.
            eventually(
                lambda: all(pool.num_free == len(pool.ids) for pool in blocks.pools),
                "every block of all groups is free",
            )
            client.send(Shutdown())
            thread.join(PATIENCE_MS / 1000)
            assert not thread.is_alive()
        finally:
            loop.stop()
            thread.join()
            connector.close()
            channel.close(0)
            socket.close(0)
            wake_up.close()


@pytest.fixture(scope="module", params=["llama", "ministral", "qwen3-5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers all see everything, or one in which many see a window or keep a state."""
    into = tmp_path_factory.mktemp("model")
    return save_tiny_model("llama", into) if request.param == "llama" else save_tiny(request.param, into)


@pytest.fixture(params=[False, True], ids=["one after another", "ahead"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def prompt(length: int) -> list[int]:
    return random_prompt(length, seed=length)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 30])
def test_three_children_are_answered_like_three_requests(folder: Path, overlap: bool, length: int) -> None:
    with engine(folder, overlap) as client:
        together = client.ask(prompt(length), [1, 2, 3], "together")
        apart = [client.ask(prompt(length), [seed], str(seed))[0] for seed in (1, 2, 3)]
    assert together == apart
    assert len({tuple(answer) for answer in together}) == 3


def test_a_step_is_one_message_however_many_requests_it_holds(folder: Path, overlap: bool) -> None:
    with engine(folder, overlap) as client:
        answers = client.ask(prompt(9), range(1, 9), max_tokens=10)
        assert sum(map(len, answers)) == 80
        assert client.crossings == 10


def test_an_engine_that_is_asked_for_its_stats_sends_them_though_they_are_the_same(folder: Path, overlap: bool) -> None:
    with engine(folder, overlap) as client:
        first, second = client.stats_asked_for(1), client.stats_asked_for(2)
        assert (first.queue.running, first.steps) == (second.queue.running, second.steps) == (0, 0)
        client.ask(prompt(9), [1], max_tokens=2)
        assert client.stats_asked_for(3).steps > 0


def test_an_engine_gives_memory_back_once_each_time_that_it_rests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "REST_MS", 1)
    rests = threading.Semaphore(0)
    with engine(folder, overlap=False, give_back=rests.release) as client:
        for _ in range(3):
            assert rests.acquire(timeout=PATIENCE_MS / 1000)
            assert not rests.acquire(timeout=0.05), "it sleeps until there is work"
            client.ask(prompt(9), [1], "fresh")


def test_an_idle_engine_ends_what_is_only_fetched_with_all_its_children(folder: Path, overlap: bool) -> None:
    asked = [(prompt(9), SamplingParams(max_tokens=20, seed=1), [2, 3])]
    with engine(folder, overlap) as client:
        answers = client.together(asked, emitted=[[[5] * 4, [6] * 9, [7] * 2]], fetch_only=True)
    assert [(answer.end.finish, answer.tokens) for answer in answers.values()] == [(FinishReason.LENGTH, [])] * 3


def test_children_are_answered_alike_when_blocks_run_out(folder: Path, overlap: bool) -> None:
    with engine(folder, overlap) as roomy:
        wanted = roomy.ask(prompt(18), [1, 2, 3, 4], max_tokens=40)
    with engine(folder, overlap, num_blocks=32) as tight:
        assert tight.ask(prompt(18), [1, 2, 3, 4], max_tokens=40) == wanted


@pytest.mark.parametrize("length", [3, 4, 9, 16, 17, 40])
def test_a_prompt_from_the_prefix_cache_is_answered_alike(folder: Path, overlap: bool, length: int) -> None:
    with engine(folder, overlap) as client:
        first, again = (client.finished(prompt(length), [5])[0] for _ in range(2))
        assert first[1] == again[1]
        assert again[0].report is not None
        # At least two tokens are computed again: a single one would pass other kernels.
        assert again[0].report.cached_tokens == (length - 2) // BLOCK_SIZE * BLOCK_SIZE
        # The next turn of a conversation begins with this one's answer.
        turn = [*prompt(length), *first[1], 7, 8, 9]
        assert client.ask(turn, [6]) == client.ask(turn, [6], "fresh")


def test_another_salt_finds_nothing(folder: Path, overlap: bool) -> None:
    with engine(folder, overlap) as client:
        cached = []
        for salt in ("a", "b", "a"):
            ((end, _),) = client.finished(prompt(20), [5], salt)
            assert end.report is not None
            cached.append(end.report.cached_tokens)
    assert cached == [0, 0, 16]


def test_what_is_not_finite_ends_its_request_and_leaves_the_cache_clean(folder: Path, overlap: bool) -> None:
    ids = prompt(20)
    with engine(folder, overlap) as client:
        wanted = client.ask(ids, [1])
        # Its cached blocks are spoiled, as a faulty transfer or chip would do.
        hashes: list[bytes] = []
        extend_hashes(hashes, ids, 5, BLOCK_SIZE, "")
        cached = list(client.blocks.match(hashes, 5, Match()))
        assert len(cached) == 5
        client.runner.kv_cache[cached] = float("nan")
        broken = client.finished(ids, [1, 2])
        assert [(end.finish, end.error) for end, _ in broken] == [(FinishReason.ERROR, NOT_FINITE)] * 2
        assert client.ask(ids, [1]) == wanted


def test_an_answer_that_its_grammar_ends_leaves_the_others(
    folder: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its matcher had a defect, or the time of the client's request was over after the parent's first token."""
    asked: list[GrammarMatcher] = []
    allows = GrammarMatcher.allows

    def fails_second(self: GrammarMatcher, answer: Sequence[int], token_id: int, aside: bool = False) -> bool:
        if self not in asked:
            asked.append(self)
        if asked.index(self) == 1:
            self.failure = "too much work"
        return allows(self, answer, token_id, aside)

    monkeypatch.setattr(GrammarMatcher, "allows", fails_second)
    grammar = Grammar(GrammarKind.REGEX, "[a-p]{12}")
    sampling = SamplingParams(max_tokens=3, seed=1, grammar=grammar)
    with engine(folder, overlap) as client:
        answers = client.together([(prompt(9), sampling, [2, 3])])
    ends = [(answer.end.finish, answer.end.error) for answer in answers.values()]
    assert ends == [(FinishReason.LENGTH, None), (FinishReason.REFUSED, "too much work"), (FinishReason.LENGTH, None)]


def test_a_prompt_that_does_not_fit_ends_all_its_children(folder: Path, overlap: bool) -> None:
    with engine(folder, overlap) as client:
        ends = client.finished([VOCAB_SIZE], [1, 2, 3])
        assert {end.finish for end, _ in ends} == {FinishReason.ERROR}
        assert all("outside" in (end.error or "") for end, _ in ends)


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.0, "presence_penalty": -0.5},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "temperature": 0.9},
    {"frequency_penalty": 1.0, "temperature": 0.9},
    {"repetition_penalty": 1.3, "temperature": 0.9},
]


def with_penalties(penalties: Sequence[dict[str, Any]]) -> list[tuple[list[int], SamplingParams, Sequence[int]]]:
    common: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    return [(prompt(18 + i), SamplingParams(seed=i, **common | more), []) for i, more in enumerate(penalties)]


@pytest.fixture(scope="module")
def penalised(folder: Path) -> list[list[int]]:
    """Returns the answers with ``PENALTIES`` where all have room."""
    with engine(folder, overlap=False, num_blocks=200) as roomy:
        answers = list(roomy.together(with_penalties(PENALTIES)).values())
        temperatures = [{"temperature": more.get("temperature", 0.0)} for more in PENALTIES]
        without = roomy.together(with_penalties(temperatures)).values()
    changed = [a.tokens != b.tokens for a, b in zip(answers, without, strict=True)]
    # One kind of penalty may change no token of a short answer.
    assert sum(changed) >= len(PENALTIES) - 1
    return [answer.tokens for answer in answers]


def test_penalties_survive_preemption(folder: Path, overlap: bool, penalised: list[list[int]]) -> None:
    with engine(folder, overlap, num_blocks=40) as tight:
        got = tight.together(with_penalties(PENALTIES))
        tight.wait_for_a_preemption()
    assert [answer.tokens for answer in got.values()] == penalised
