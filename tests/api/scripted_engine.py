"""A stand-in for the engine process, which speaks its protocol, computes nothing and records the messages it receives.

``python -m tests.api.scripted_engine JOURNAL`` reads an EngineLaunch from standard input. It writes one JSON line into
the journal for each message that it receives.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import zmq
from tokenizers import Tokenizer

from pdserve.config import EngineLaunch
from pdserve.process import read_launch
from pdserve.wire.engine import (
    Abort,
    AskStats,
    Assign,
    ChildRequest,
    EngineFailed,
    EngineStats,
    FinishReason,
    FromEngine,
    Meet,
    Met,
    PrefillDecisions,
    PrefillNodeStats,
    PrefillReason,
    PrefillSource,
    PrefillStats,
    Ready,
    Renew,
    RequestOutput,
    RequestReport,
    Shutdown,
    Starting,
    Stats,
    StepOutput,
    StepStats,
    Submit,
    ToEngine,
)
from pdserve.wire.engine_counts import CacheStats, QueueStats, SchedulerCounts, TransferCounts
from pdserve.wire.sampling_params import PromptLogprobs, SamplingParams, TokenLogprobs
from tests.api.behaviour import ENDLESS_TOKEN_TEXT, ENGINE_FAILURE, REPLY_TEXT, SPLIT_TEXT, Behaviour

MAX_MODEL_LEN = 256
EOS = 2
STEP_MS = 2
NEVER_READY = "never-ready"
"""A file of this name beside the journal keeps the engine from becoming ready."""
GATE = "gate"
"""A file of this name beside the journal lets ``Behaviour.GATED`` go on."""
SLOW_S = 0.05
PREFILL = PrefillStats(
    decisions=(PrefillDecisions(PrefillSource.REMOTE, PrefillReason.SOONER, 5),),
    nodes=(PrefillNodeStats("prefill-7", 1700.0, 512, 0.004, 3e9),),
    tokens_per_s=1600.0,
    last_local_s=0.75,
)
STEP = StepStats(shared=3, shared_prompt_tokens=48, shared_late=1, itl_target_s=0.05, parts={"batch": 0.012})
REPORT = RequestReport(
    prefill_source=PrefillSource.REMOTE,
    prefill_node="prefill-7",
    cached_tokens=3,
    queue_s=0.01,
    prefill_s=0.02,
    transfer_s=0.005,
)


@dataclass
class Running:
    local_id: int
    submit: Submit
    behaviour: Behaviour
    text_ids: list[int]
    sent: int = 0
    resume_at: float = 0.0
    ended: bool = field(default=False)


class ScriptedEngine:
    def __init__(self, launch: EngineLaunch, journal: Path) -> None:
        self._tokenizer_file = Path(launch.config.model_dir, "tokenizer.json")
        self._places = launch.config.scheduler.max_num_seqs or 8
        self._journal = journal
        self._requests: dict[int, Running] = {}
        self._stats = EngineStats(cache=CacheStats(total_blocks=100, free_blocks=100), prefill=PREFILL, step=STEP)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.connect(launch.address)
        self._messages: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """It takes long to read, and many tests ask for no answer."""
        return Tokenizer.from_file(str(self._tokenizer_file))

    def run(self) -> None:
        self._send(Starting("loading weights"))
        if self._journal.with_name(NEVER_READY).exists():
            threading.Event().wait()
        self._send(
            Ready(
                control="",
                fingerprint="f" * 32,
                num_blocks=100,
                block_size=16,
                max_model_len=MAX_MODEL_LEN,
                max_running=self._places,
                vocab_size=49_152,
            )
        )
        while True:
            while self._socket.poll(STEP_MS if self._requests else 1_000):
                message = self._messages.decode(self._socket.recv())
                with self._journal.open("ab") as file:
                    file.write(msgspec.json.encode(message) + b"\n")
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            self._step()

    def _take(self, message: Submit | Abort | Renew | Assign | Meet | AskStats) -> None:
        match message:
            case Submit():
                parent = ChildRequest(message.local_id, message.sampling.seed, message.emitted)
                for member in (parent, *message.children):
                    behaviour = Behaviour.of_seed(member.seed)
                    running = Running(member.local_id, message, behaviour, self._reply(behaviour), len(member.emitted))
                    self._requests[member.local_id] = running
                count, known = message.sampling.prompt_logprobs, len(message.token_ids) - 1
                if count is not None and known:
                    scores = prompt_logprobs_of(message.token_ids[1:], count)
                    self._send(StepOutput([RequestOutput(message.local_id, [], prompt_logprobs=scores)]))
            case Abort(local_ids):
                for local_id in local_ids:
                    self._requests.pop(local_id, None)
                self._stats = msgspec.structs.replace(self._stats, queue=QueueStats(running=len(self._requests)))
                self._send(Stats(self._stats))
            case AskStats(number):
                self._send(Stats(self._stats, number))
            case Meet(number):
                self._send(Met(number))
            case Renew() | Assign():
                pass  # The message is in the journal.

    def _reply(self, behaviour: Behaviour) -> list[int]:
        texts = {
            Behaviour.SPLIT_CHARACTER: SPLIT_TEXT,
            Behaviour.STOP_TOKEN: "Hello,",
            Behaviour.ENDLESS: ENDLESS_TOKEN_TEXT,
        }
        ids: list[int] = self._tokenizer.encode(texts.get(behaviour, REPLY_TEXT), add_special_tokens=False).ids
        return ids

    def _step(self) -> None:
        outputs = [
            with_logprobs(output, request.submit.sampling)
            for request in self._requests.values()
            if (output := self._advance(request)) is not None
        ]
        self._requests = {key: request for key, request in self._requests.items() if not request.ended}
        if outputs:
            generated = self._stats.scheduler.generated_tokens + sum(len(output.new_token_ids) for output in outputs)
            self._stats = msgspec.structs.replace(
                self._stats,
                queue=QueueStats(running=len(self._requests)),
                cache=CacheStats(total_blocks=100, free_blocks=100 - 25 * len(self._requests)),
                scheduler=SchedulerCounts(generated_tokens=generated, preemptions=4),
                transfer=TransferCounts(leases_expired_receiving=1),
                transfer_failures={"peer_lost": 2},
            )
            self._send(StepOutput(outputs))
            self._send(Stats(self._stats))

    def _advance(self, request: Running) -> RequestOutput | None:
        kind, local_id = request.behaviour, request.local_id
        if kind is Behaviour.SILENT or time.monotonic() < request.resume_at:
            return None
        if (finish := self._finish(request)) is not None:
            # The tokens that were emitted elsewhere end the answer.
            request.ended = True
            return RequestOutput(local_id, [], finish, REPORT)
        if kind is Behaviour.BURST:
            request.ended = True
            return RequestOutput(local_id, [*request.text_ids, EOS][request.sent :], FinishReason.STOP, REPORT)
        if kind in (Behaviour.ERROR, Behaviour.DEADLINE) or (request.sent == 2 and kind in LATE):
            return self._fail(request)
        if request.sent == 2 and kind is Behaviour.HOLD:
            return None
        if request.sent == 2 and kind is Behaviour.GATED and not self._journal.with_name(GATE).exists():
            return None
        request.sent += 1
        if kind is Behaviour.SLOW and request.sent == 2:
            request.resume_at = time.monotonic() + SLOW_S
        return self._next_token(request)

    def _next_token(self, request: Running) -> RequestOutput:
        finish = self._finish(request)
        request.ended = finish is not None
        return RequestOutput(request.local_id, [self._last_token(request)], finish, REPORT if finish else None)

    def _last_token(self, request: Running) -> int:
        """The last of the tokens that were sent."""
        index = request.sent - 1
        if request.behaviour is Behaviour.ENDLESS:
            return request.text_ids[0]
        return request.text_ids[index] if index < len(request.text_ids) else EOS

    def _finish(self, request: Running) -> FinishReason | None:
        """Why the tokens that were sent end the answer; None if they do not."""
        if not request.sent:
            return None
        last_stop = request.behaviour is Behaviour.STOP_TOKEN and request.sent == len(request.text_ids)
        if self._last_token(request) == EOS or last_stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.sent >= request.submit.sampling.max_tokens else None

    def _fail(self, request: Running) -> RequestOutput:
        request.ended = True
        local_id = request.local_id
        if request.behaviour is Behaviour.DIE:
            os._exit(7)
        if request.behaviour is Behaviour.FAIL:
            self._send(EngineFailed(ENGINE_FAILURE))
            sys.exit(1)
        if request.behaviour in (Behaviour.DEADLINE, Behaviour.DEADLINE_LATE):
            return RequestOutput(local_id, [], FinishReason.DEADLINE, REPORT)
        return RequestOutput(local_id, [], FinishReason.ERROR, REPORT, "the scripted engine failed on purpose")

    def _send(self, message: FromEngine) -> None:
        self._socket.send(msgspec.msgpack.encode(message))


def with_logprobs(output: RequestOutput, sampling: SamplingParams) -> RequestOutput:
    """Adds the log probabilities that the request asks for."""
    return msgspec.structs.replace(output, logprobs=reported(output.new_token_ids, sampling))


def reported(token_ids: Sequence[int], sampling: SamplingParams) -> list[TokenLogprobs] | None:
    """Returns log probabilities of the tokens, if they are asked for.

    A token ``i`` is the second likeliest, after ``i + 2`` and before ``i + 1``. One that the request names has the
    logarithm ``-i``.
    """
    if sampling.logprobs is None or not token_ids:
        return None
    all_of_them = [logprobs_of(token_id, sampling.logprobs) for token_id in token_ids]
    if not sampling.logprob_token_ids:
        return all_of_them
    named = tuple((token_id, float(-token_id)) for token_id in sorted(sampling.logprob_token_ids))
    return [msgspec.structs.replace(each, top=named) for each in all_of_them]


def logprobs_of(token_id: int, count: int) -> TokenLogprobs:
    likeliest = ((token_id + 2, -0.5), (token_id, -1.0), (token_id + 1, float("-inf")))
    return TokenLogprobs(-1.0, 2, likeliest[:count])


def prompt_logprobs_of(token_ids: Sequence[int], count: int) -> PromptLogprobs:
    """Returns what ``logprobs_of`` says of each of these tokens of a prompt."""
    tokens = [logprobs_of(token_id, count) for token_id in token_ids]
    top = [pair for token in tokens for pair in token.top]
    count = min(count, 3)
    return PromptLogprobs(
        count,
        struct.pack(f"<{len(tokens)}f", *(token.chosen for token in tokens)),
        struct.pack(f"<{len(tokens)}I", *(token.rank for token in tokens)),
        struct.pack(f"<{len(top)}I", *(token_id for token_id, _ in top)),
        struct.pack(f"<{len(top)}f", *(logprob for _, logprob in top)),
    )


LATE = (Behaviour.ERROR_LATE, Behaviour.DEADLINE_LATE, Behaviour.FAIL, Behaviour.DIE)


def main() -> None:
    launch = read_launch(EngineLaunch)
    ScriptedEngine(launch, Path(sys.argv[1])).run()


if __name__ == "__main__":
    main()
