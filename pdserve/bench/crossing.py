"""What the way from the engine to its API process costs: a step's tokens in one message, and each in one of its own."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass

import msgspec
import zmq

from pdserve.engine.api_channel import ApiChannel
from pdserve.wire.engine import FromEngine, RequestOutput, StepOutput

_TOKENS = 1024
_ROUNDS = 40
_GOODBYE_S = 1.0


@dataclass(frozen=True, slots=True)
class Crossing:
    """CPU seconds of the receiving thread for one token."""

    at_once_s: float
    one_by_one_s: float


def crossing() -> Crossing:
    """The median over steps of 1,024 requests, over the same kind of socket as between the two processes."""
    return Crossing(_received(batched=True), _received(batched=False))


def _received(*, batched: bool) -> float:
    step = StepOutput([RequestOutput(request, [request]) for request in range(_TOKENS)])
    decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
    used: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder,
        zmq.Context() as context,
        context.socket(zmq.PAIR) as api,
    ):
        address = f"ipc://{folder}/engine"
        api.bind(address)
        channel = ApiChannel(context, address, batched=batched)
        for _ in range(_ROUNDS):
            channel.send(step)
            began, tokens = time.thread_time(), 0
            while tokens < _TOKENS:
                message = decoder.decode(api.recv())
                assert isinstance(message, StepOutput)
                tokens += len(message.outputs)
            used.append(time.thread_time() - began)
        channel.close(_GOODBYE_S)
    return statistics.median(used) / _TOKENS
