"""An engine without a model, as a process: ``python -m pdserve.bench.stream.mock_engine SCRIPT``.

It speaks the engine's side of the private channel, through the engine's own end of it, and gives every running request
the next word of a set text at a set pace. What it does is in the script, a file that it reads anew whenever the first
of some requests comes.
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

from pdserve.bench.stream.credit import CreditReader, credit_of
from pdserve.config import EngineLaunch, Switch
from pdserve.engine.api_channel import ApiChannel
from pdserve.errors import EngineError
from pdserve.process import read_launch, set_up_logging
from pdserve.wire.engine import (
    Abort,
    FinishReason,
    PrefillSource,
    Ready,
    RequestOutput,
    RequestReport,
    Shutdown,
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
    """What the engine does for a number of requests that belong together."""

    requests: int
    step_s: float
    """From one step to the next at least. Each gives every running request a token."""
    seconds: float
    """For which all requests run together, after the last one has joined; then all end."""
    admit: int
    """Prompts that one step takes in."""
    token_ids: tuple[int, ...]
    """Of the text that every answer repeats."""
    last_token_id: int
    """Of every answer, and of no other place in one."""
    credit_file: str = ""
    """A FIFO by which clients tell what they have got (``credit``). Empty: the engine does not wait for them."""
    ahead: float = 0.0
    """Tokens a request by which it may be ahead of its clients, beside what a node keeps of chunks in the making."""


class MockEngine:
    """What it is asked, and what a step makes of that. Sans I/O; times are seconds of one monotonic clock."""

    def __init__(self, script: Script) -> None:
        self._script = script
        # Made once: what a token costs here must be little beside what it costs those who are measured.
        self._tokens = [[token_id] for token_id in script.token_ids]
        self._waiting: deque[int] = deque()
        self._given: dict[int, int] = {}
        """Tokens of each running request."""
        self._joined = 0
        self._over_s = math.inf
        self.tokens = 0
        """Of all requests."""

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
        """The next token of every request, also of those that this step takes in."""
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
    """Drives it: the channel, the clock, and the clients' credit."""

    def __init__(self, channel: ApiChannel, script_file: Path, interval: int) -> None:
        """``interval`` is how many tokens make a chunk."""
        self._channel = channel
        self._script_file = script_file
        self._interval = interval

    def serve(self) -> None:
        """Until the API process says Shutdown. Raises EngineError if it has stopped reading."""
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
        """Until no request is left. False after Shutdown."""
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
            if engine.idle:
                return True
            most = (self._interval - 1 + ahead) * engine.running
            far_ahead = credit is not None and engine.tokens - credit.read() > most
            now = time.monotonic()
            if now >= due_s and not far_ahead:
                self._channel.send(engine.step(now))
                # A step that comes late is late; steps that were missed altogether are not made up for.
                due_s = max(due_s, now - step_s) + step_s
            elif far_ahead:
                poller.poll()
            else:
                poller.poll(math.ceil((due_s - now) * 1000))
            messages = self._channel.receive()


def main(argv: list[str]) -> int:
    """As the engine's own main: the launch message comes on standard input."""
    launch = read_launch(EngineLaunch)
    set_up_logging(launch.config.log.level)
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
                    max_running=launch.config.scheduler.max_running,
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
