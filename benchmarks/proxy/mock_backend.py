"""A node process that computes nothing: ``python -m benchmarks.proxy.mock_backend ROLE MODEL CONTROL``.

It registers at the proxy with the control address CONTROL as nodes do, with the cluster secret from the environment. It
answers HTTP as cheaply as Python can, so that the measured time is the proxy's. A stream has as many chunks as
``max_tokens`` says and the gap between them that ``user`` says (``gap-20`` for 20 ms); without a gap every stream sends
one chunk in each turn of the event loop. Every stream has journal entries, as if its ticket had asked for them: the
backend does not look at tickets.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import suppress

import uvloop

from benchmarks.programs import study_program
from pdserve.api.node.registration import Registration
from pdserve.control.journal import DONE_ENTRY, entry
from pdserve.process import die_with_parent
from pdserve.wire.discovery import Capacity, NodeInfo, NodeLoad, Role
from pdserve.wire.ids import new_id
from pdserve.wire.version import SPOKEN

SECRET_ENV = "PDSERVE_SECRET"  # noqa: S105 (a name)
HEARTBEAT_MS = 1000
BACKLOG = 4096
CHUNK = entry(0, [31415]) + (
    b'data: {"id":"cmpl-0","object":"text_completion","created":1,"model":"bench",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
ANSWER = (
    b'{"id":"cmpl-0","object":"text_completion","created":1,"model":"bench",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2},'
    b'"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"bench",'
    b'"remote_block_ids":[1],"remote_host":"127.0.0.1","remote_port":1}}'
)
"""It includes the fields that a router which sends two requests passes on from the first to the second."""

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": *true')
_CHUNKS = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')
_GAP_MS = re.compile(rb'"gap-(\d+)"')


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_STREAM_CHUNK = _framed(CHUNK)
_STREAM_END = _framed(DONE_ENTRY + b"data: [DONE]\n\n") + b"0\r\n\r\n"
_PLAIN_ANSWER = _plain(ANSWER)
_HEALTHY = _plain(b"{}")


class BackendConnection(asyncio.Protocol):
    """Answers requests one after the other: a stream ends before the next request is answered."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._left = 0
        self._gap_s = 0.0
        self._due_s = 0.0
        self._next: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives one
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while self._next is None and (request := self._take_request()):
            self._answer(request)

    def _take_request(self) -> bytes:
        """Returns the next complete request out of the bytes that have come; empty if there is none."""
        data = self._rest
        end = data.find(_HEAD_END)
        if end < 0:
            return b""
        length = _LENGTH.search(data, 0, end)
        size = end + len(_HEAD_END) + (int(length[1]) if length else 0)
        if len(data) < size:
            return b""
        self._rest = data[size:]
        return data[:size]

    def _answer(self, request: bytes) -> None:
        if not request.startswith(b"POST"):
            self._transport.write(_HEALTHY)
        elif not _STREAM.search(request):
            self._transport.write(_PLAIN_ANSWER)
        else:
            chunks, gap_ms = _CHUNKS.search(request), _GAP_MS.search(request)
            self._left = int(chunks[1]) if chunks else 1
            self._gap_s = int(gap_ms[1]) / 1000 if gap_ms else 0.0
            self._due_s = self._loop.time()
            self._transport.write(_STREAM_HEAD)
            self._send_chunk()

    def _send_chunk(self) -> None:
        self._next = None
        if not self._left:
            self._transport.write(_STREAM_END)
            self.data_received(b"")
            return
        self._left -= 1
        self._transport.write(_STREAM_CHUNK)
        if self._gap_s:
            self._due_s += self._gap_s
            self._next = self._loop.call_at(self._due_s, self._send_chunk)
        else:
            self._next = self._loop.call_soon(self._send_chunk)


async def serve(role: Role, model: str, control: str, secret: bytes) -> None:
    """Serves until cancelled."""
    server = await asyncio.get_running_loop().create_server(BackendConnection, "127.0.0.1", 0, backlog=BACKLOG)
    host, port = server.sockets[0].getsockname()
    node = NodeInfo(
        protocol=SPOKEN.newest,
        oldest_protocol=SPOKEN.oldest,
        name=f"bench-{role.value}",
        boot_id=new_id(),
        role=role,
        url=f"http://{host}:{port}",
        control=f"tcp://{host}:1" if role is Role.PREFILL else "",
        model=model,
        fingerprint="bench",
        capacity=Capacity(max_running=2**16, num_blocks=2**20, block_size=16, max_model_len=2**20),
    )
    registration = Registration(node, (control,), secret, HEARTBEAT_MS, NodeLoad)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(registration.run())
        await registration.registered[control].wait()
        print(f" INFO pdserve backend listening url={node.url}", flush=True)


def backend_command(role: Role, model: str, control: str) -> tuple[str, ...]:
    return study_program("benchmarks.proxy.mock_backend", role.value, model, control)


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    die_with_parent(environ)
    role, model, control = argv
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(Role(role), model, control, environ[SECRET_ENV].encode()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
