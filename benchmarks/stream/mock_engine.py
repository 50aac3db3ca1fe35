"""An engine process without a model: ``python -m benchmarks.stream.mock_engine SCRIPT``.

It uses the engine's own end of the private channel to the API process, and gives every running request the next word of
a set text at a set pace. It reads its script from a file again whenever the first of several requests comes.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from benchmarks.stream.credit import CreditReader, credit_of
from pdserve.config import EngineLaunch, Switch
from pdserve.engine.api_channel import ApiChannel
from pdserve.errors import EngineError
from pdserve.process import read_launch, set_up_logging
from pdserve.wire.engine import (
    Abort,
    AskStats,
    EngineStats,
    FinishReason,
    PrefillSource,
    Ready,
    RequestOutput,
    RequestReport,
    Shutdown,
    Stats,
    StepOutput,
    Submit,
    ToEngine,
)

VOCAB_SIZE = 2**20
MAX_MODEL_LEN = 2**24
_GOODBYE_S = 1.0
_REPORT = RequestReport(
    prefill_source=PrefillSource.LOCAL, prefill_node="", cached_tokens=0, queue_s=0.0, prefill_s=0.0, transfer_s=0.0
)

log = logging.getLogger(__name__)


class Script(msgspec.Struct, frozen=True):
    """The engine's behaviour for a number of requests that belong together."""

    requests: int
    step_s: float
    """The least time from one step to the next. Each step gives every running request a token."""
    seconds: float
    """The time for which all requests run together after the last one has joined; then all end."""
    admit: int
    """The number of prompts that one step takes in."""
    token_ids: tuple[int, ...]
    """The tokens of the text that every answer repeats."""
    last_token_id: int
    """The last token of every answer, which is at no other place in an answer."""
    credit_file: str = ""
    """The FIFO in which clients tell how many tokens came (``credit``); empty if the engine does not wait for them."""
    ahead: float = 0.0
    """The tokens of each request that it may be ahead of its clients, beside those that a node collects for a chunk."""


class MockEngine:
    """The requests, and the tokens of each step. It does no I/O; times are seconds of one monotonic clock."""

    def __init__(self, script: Script) -> None:
        self._script = script
        # These lists are made once: a token must cost little here beside what it costs the processes that are measured.
        self._tokens = [[token_id] for token_id in script.token_ids]
        self._waiting: deque[int] = deque()
        self._given: dict[int, int] = {}
        """The number of tokens that each running request has got."""
        self._joined = 0
        self._over_s = math.inf
        self.tokens = 0
        """The number of tokens that all requests have got."""

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._given

    def submit(self, request: Submit) -> None:
        self._waiting.append(request.local_id)

    def abort(self, abort: Abort) -> None:
        gone = set(abort.local_ids)
        for local_id in gone:
            self._given.pop(local_id, None)
        self._waiting = deque(local_id for local_id in self._waiting if local_id not in gone)

    @property
    def running(self) -> int:
        return len(self._given)

    def step(self, now: float) -> StepOutput:
        """Returns the next token of every request, including those that this step takes in."""
        for _ in range(min(self._script.admit, len(self._waiting))):
            self._given[self._waiting.popleft()] = 0
            self._joined += 1
            if self._joined == self._script.requests:
                self._over_s = now + self._script.seconds
        self.tokens += len(self._given)
        if now >= self._over_s:
            return self._last_step()
        tokens, period = self._tokens, len(self._tokens)
        outputs = []
        for local_id, given in self._given.items():
            outputs.append(RequestOutput(local_id, tokens[given % period]))
            self._given[local_id] = given + 1
        return StepOutput(outputs)

    def _last_step(self) -> StepOutput:
        last = [self._script.last_token_id]
        outputs = [RequestOutput(local_id, last, FinishReason.LENGTH, _REPORT) for local_id in self._given]
        self._given.clear()
        return StepOutput(outputs)


class MockServer:
    """Drives a ``MockEngine`` with the channel's messages, the clock, and the clients' credit."""

    def __init__(self, channel: ApiChannel, script_file: Path, interval: int) -> None:
        """``interval`` is the number of tokens of a chunk."""
        self._channel = channel
        self._script_file = script_file
        self._interval = interval

    def serve(self) -> None:
        """Serves until the API process sends Shutdown. Raises EngineError if it has stopped reading."""
        while True:
            self._channel.socket.poll()
            messages = self._channel.receive()
            script = msgspec.json.decode(self._script_file.read_bytes(), type=Script)
            with credit_of(script.credit_file) as credit:
                if not self._play(MockEngine(script), script, credit, messages):
                    return

    def _play(
        self, engine: MockEngine, script: Script, credit: CreditReader | None, messages: Sequence[ToEngine]
    ) -> bool:
        """Runs steps until no request is left. Returns False after Shutdown."""
        poller = zmq.Poller()
        poller.register(self._channel.socket, zmq.POLLIN)
        if credit is not None:
            poller.register(credit.fileno(), zmq.POLLIN)
        step_s, ahead = script.step_s, script.ahead
        due_s = time.monotonic() + step_s
        while True:
            for message in messages:
                if isinstance(message, Shutdown):
                    return False
                if isinstance(message, Submit):
                    engine.submit(message)
                if isinstance(message, Abort):
                    engine.abort(message)
                if isinstance(message, AskStats):  # its node asks before it ends
                    self._channel.send(Stats(EngineStats(), message.number))
            if engine.idle:
                return True
            most = (self._interval - 1 + ahead) * engine.running
            far_ahead = credit is not None and engine.tokens - credit.read() > most
            now = time.monotonic()
            if now >= due_s and not far_ahead:
                self._channel.send(engine.step(now))
                # A late step stays late, and the steps that were missed are not made up for.
                due_s = max(due_s, now - step_s) + step_s
            elif far_ahead:
                poller.poll()
            else:
                poller.poll(math.ceil((due_s - now) * 1000))
            messages = self._channel.receive()


def main(argv: list[str]) -> int:
    """Runs the engine like the engine's own main: the launch message comes on standard input."""
    launch = read_launch(EngineLaunch)
    set_up_logging(launch.config.log, "engine")
    stream = launch.config.stream
    batched = stream.batched_dispatch is Switch.ON
    with zmq.Context() as context:
        channel = ApiChannel(context, launch.address, batched=batched)
        try:
            channel.send(
                Ready(
                    control="",
                    fingerprint="mock",
                    num_blocks=2**20,
                    block_size=launch.config.cache.block_size,
                    max_model_len=MAX_MODEL_LEN,
                    max_running=launch.config.scheduler.max_num_seqs or 64,
                    vocab_size=VOCAB_SIZE,
                )
            )
            MockServer(channel, Path(argv[0]), stream.interval).serve()
        except EngineError as exc:
            log.error("%s", exc)
            return 1
        finally:
            channel.close(_GOODBYE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
