"""The engine's end of the private channel to its API process, and what wakes its step loop besides."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import zmq

from pdserve.errors import EngineError, MalformedFrame
from pdserve.wire.engine import FromEngine, RequestOutput, StepOutput, ToEngine

SEND_LIMIT = 100_000
"""The engine takes the API process for hanging when it is this many messages behind."""


class ApiChannel:
    """A connected ZMQ PAIR that carries typed MessagePack both ways. No call blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, batched: bool = True) -> None:
        """Connects to the API process. Without ``batched``, each token is a message, which benchmarks compare with."""
        self._batched = batched
        self._socket = context.socket(zmq.PAIR)
        self._socket.sndhwm = SEND_LIMIT
        self._socket.rcvhwm = SEND_LIMIT
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket, to be polled for POLLIN."""
        return self._socket

    def send(self, message: FromEngine) -> None:
        """Queues a message. Raises EngineError if the API process has stopped reading."""
        for part in one_by_one(message) if isinstance(message, StepOutput) and not self._batched else (message,):
            self._send(part)

    def _send(self, message: FromEngine) -> None:
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again as exc:
            raise EngineError(f"the API process is {SEND_LIMIT} messages behind") from exc

    def receive(self) -> list[ToEngine]:
        """Returns all messages that have arrived."""
        messages: list[ToEngine] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(frame))
            except msgspec.DecodeError as exc:
                raise MalformedFrame(f"unexpected message from the API process: {exc}") from exc

    def close(self, linger_s: float) -> None:
        """Closes the socket. Queued messages have ``linger_s`` to leave."""
        self._socket.close(linger=int(linger_s * 1000))


def one_by_one(step: StepOutput) -> Iterator[StepOutput]:
    """Yields a message for each token of a step; a request's ending goes with its last token."""
    for output in step.outputs:
        if output.prompt_logprobs is not None:
            yield StepOutput([output])
            continue
        tokens, logprobs = output.new_token_ids, output.logprobs
        for index in range(len(tokens) - 1):
            own = None if logprobs is None else logprobs[index : index + 1]
            yield StepOutput([RequestOutput(output.local_id, tokens[index : index + 1], logprobs=own)])
        last = None if logprobs is None else logprobs[-1:]
        yield StepOutput([msgspec.structs.replace(output, new_token_ids=tokens[-1:], logprobs=last)])


class WakeUp:
    """An eventfd that any thread or signal handler sets, and that the step loop polls and clears."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)
