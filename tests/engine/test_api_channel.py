"""Tests the engine's end of the channel: one message a step, or one a token."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq

from pdserve.engine.api_channel import ApiChannel
from pdserve.wire.engine import FinishReason, FromEngine, RequestOutput, Starting, StepOutput
from pdserve.wire.sampling_params import TokenLogprobs

WAIT_MS = 5_000
LOGPROBS = [TokenLogprobs(-float(i), 1, ()) for i in range(3)]
STEP = StepOutput(
    [
        RequestOutput(1, [10, 11, 12], FinishReason.STOP, logprobs=LOGPROBS),
        RequestOutput(2, [20]),
        RequestOutput(3, [], FinishReason.ERROR, error="no"),
        RequestOutput(4, [40, 41]),
    ]
)
TOKEN_BY_TOKEN = [
    RequestOutput(1, [10], logprobs=LOGPROBS[:1]),
    RequestOutput(1, [11], logprobs=LOGPROBS[1:2]),
    RequestOutput(1, [12], FinishReason.STOP, logprobs=LOGPROBS[2:]),
    RequestOutput(2, [20]),
    RequestOutput(3, [], FinishReason.ERROR, error="no"),
    RequestOutput(4, [40]),
    RequestOutput(4, [41]),
]


@pytest.mark.parametrize("batched", [True, False])
def test_a_step_is_one_message_or_one_for_each_token(batched: bool, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    expected = [STEP] if batched else [StepOutput([output]) for output in TOKEN_BY_TOKEN]
    with zmq.Context() as context, context.socket(zmq.PAIR) as api:
        api.bind(address)
        channel = ApiChannel(context, address, batched=batched)
        channel.send(STEP)
        channel.send(Starting("over"))
        channel.close(1.0)
        messages: list[FromEngine] = []
        while not messages or not isinstance(messages[-1], Starting):
            assert api.poll(WAIT_MS)
            messages.append(msgspec.msgpack.decode(api.recv(), type=FromEngine))
    assert messages == [*expected, Starting("over")]
