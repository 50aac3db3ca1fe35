"""The step loop with a real (tiny, random) model: shared and copied blocks give the tokens that computed ones give."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from pdserve.config import Dtype, SchedulerConfig
from pdserve.engine.api_channel import ApiChannel
from pdserve.engine.block_hash import extend_hashes
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.kv_connector.no_transfer import NoTransfer
from pdserve.engine.prompt_rule import PromptRule
from pdserve.engine.step_loop import NOT_FINITE, StepLoop, WakeUp
from pdserve.engine.stop_rule import StopRule
from pdserve.models.decoder_config import read_decoder_config
from pdserve.models.runner import ModelRunner
from pdserve.wire.engine import FinishReason, FromEngine, RequestOutput, Shutdown, Sibling, Stats, StepOutput, Submit
from pdserve.wire.ids import new_id
from pdserve.wire.sampling import SamplingParams
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

BLOCK_SIZE = 4
PATIENCE_MS = 30_000


class Client:
    """The API process's end of one step loop."""

    def __init__(self, runner: ModelRunner, blocks: BlockManager, socket: zmq.Socket[bytes]) -> None:
        self.runner = runner
        self.blocks = blocks
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._next = 1

    def send(self, message: Submit | Shutdown) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def ask(self, prompt: Sequence[int], seeds: Sequence[int], salt: str = "", max_tokens: int = 10) -> list[list[int]]:
        """The answer of each seed."""
        ends = self.finished(prompt, seeds, salt, max_tokens)
        assert {end.finish for end, _ in ends} == {FinishReason.LENGTH}
        return [tokens for _, tokens in ends]

    def finished(
        self, prompt: Sequence[int], seeds: Sequence[int], salt: str = "", max_tokens: int = 10
    ) -> list[tuple[RequestOutput, list[int]]]:
        """The last output of each seed, and all tokens."""
        ids = range(self._next, self._next + len(seeds))
        self._next += len(seeds)
        siblings = [Sibling(i, seed) for i, seed in zip(ids, seeds, strict=True)]
        sampling = SamplingParams(max_tokens=max_tokens, seed=seeds[0], temperature=0.9, ignore_eos=True)
        self.send(
            Submit(
                request_id=ids[0],
                uuid=new_id(),
                token_ids=list(prompt),
                sampling=sampling,
                deadline_s=60.0,
                siblings=tuple(siblings[1:]),
                cache_salt=salt,
            )
        )
        tokens: dict[int, list[int]] = {i: [] for i in ids}
        ends: dict[int, RequestOutput] = {}
        while len(ends) < len(ids):
            assert self._socket.poll(PATIENCE_MS), "the engine says nothing"
            message = self._decoder.decode(self._socket.recv())
            assert isinstance(message, StepOutput | Stats)
            for output in message.outputs if isinstance(message, StepOutput) else []:
                tokens[output.request_id] += output.new_token_ids
                if output.finish is not None:
                    ends[output.request_id] = output
        return [(ends[i], tokens[i]) for i in ids]


@contextmanager
def engine(folder: Path, num_blocks: int = 64) -> Iterator[Client]:
    config = read_decoder_config(folder)
    runner = ModelRunner(folder, config, Dtype.FP32, BLOCK_SIZE, num_blocks, 128, TorchKernels())
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    with zmq.Context() as context:
        socket = context.socket(zmq.PAIR)
        socket.bind("inproc://engine")
        channel, wake_up = ApiChannel(context, "inproc://engine"), WakeUp()
        loop = StepLoop(
            api=channel,
            wake_up=wake_up,
            runner=runner,
            blocks=blocks,
            connector=NoTransfer(blocks),
            config=SchedulerConfig(max_running=8, max_step_tokens=16),
            stop=StopRule(frozenset(config.eos_token_ids), 128),
            prompts=PromptRule(VOCAB_SIZE, 128),
        )

        def run() -> None:
            # The model is tiny, and threads that wait for each other are slow on a busy machine.
            torch.set_num_threads(1)
            loop.run()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            client = Client(runner, blocks, socket)
            yield client
            client.send(Shutdown())
            thread.join(PATIENCE_MS / 1000)
            assert not thread.is_alive()
            assert blocks.num_free == num_blocks
        finally:
            loop.stop()
            thread.join()
            channel.close(0)
            socket.close(0)
            wake_up.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB_SIZE), k=length)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 30])
def test_three_siblings_are_answered_like_three_requests(folder: Path, length: int) -> None:
    with engine(folder) as client:
        together = client.ask(prompt(length), [1, 2, 3], "together")
        apart = [client.ask(prompt(length), [seed], str(seed))[0] for seed in (1, 2, 3)]
    assert together == apart
    assert len({tuple(answer) for answer in together}) == 3


def test_siblings_are_answered_alike_when_blocks_run_out(folder: Path) -> None:
    with engine(folder) as roomy:
        wanted = roomy.ask(prompt(18), [1, 2, 3, 4], max_tokens=40)
    with engine(folder, num_blocks=32) as tight:
        assert tight.ask(prompt(18), [1, 2, 3, 4], max_tokens=40) == wanted


@pytest.mark.parametrize("length", [3, 4, 9, 16, 17, 40])
def test_a_prompt_from_the_prefix_cache_is_answered_alike(folder: Path, length: int) -> None:
    with engine(folder) as client:
        first, again = (client.finished(prompt(length), [5])[0] for _ in range(2))
        assert first[1] == again[1]
        assert again[0].report is not None
        assert again[0].report.cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        # The next turn of a conversation begins with this one's answer.
        turn = [*prompt(length), *first[1], 7, 8, 9]
        assert client.ask(turn, [6]) == client.ask(turn, [6], "fresh")


def test_what_is_not_finite_ends_its_request_and_leaves_the_cache_clean(folder: Path) -> None:
    ids = prompt(20)
    with engine(folder) as client:
        wanted = client.ask(ids, [1])
        # Spoil what the cache holds of it, as a faulty transfer or chip would.
        hashes: list[bytes] = []
        extend_hashes(hashes, ids, 5, BLOCK_SIZE, "")
        cached = client.blocks.match(hashes)
        assert len(cached) == 5
        client.runner.kv_cache[cached] = float("nan")
        broken = client.finished(ids, [1, 2])
        assert [(end.finish, end.error) for end, _ in broken] == [(FinishReason.ERROR, NOT_FINITE)] * 2
        assert client.ask(ids, [1]) == wanted


def test_a_prompt_that_does_not_fit_ends_all_its_siblings(folder: Path) -> None:
    with engine(folder) as client:
        ends = client.finished([VOCAB_SIZE], [1, 2, 3])
        assert {end.finish for end, _ in ends} == {FinishReason.ERROR}
        assert all("outside" in (end.error or "") for end, _ in ends)
