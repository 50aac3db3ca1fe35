"""Blocks over UCX: shared memory inside one host, TCP or RDMA between hosts, whatever UCX finds best.

A link is one UCX worker with one endpoint, rather than one worker for all peers: UCX can end a receive whose data has
begun to move only by closing the endpoint that it came from, and what cannot be ended even so is given up with its
worker, never progressed again. Nobody else's transfers are on that worker.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from pdserve.errors import PeerLost, TransferError
from pdserve.wire.transfer import INDEX_BITS
from pdserve_kvtransfer.transport import Arrival

log = logging.getLogger(__name__)

_INDEX_MASK = (1 << INDEX_BITS) - 1
_PROGRESS_AT_ONCE = 256
_CLOSE_ROUNDS = 200


def _load() -> tuple[Any, Any]:
    # ucxx sets variables that this UCX has no use for, and UCX would complain about them on stderr: hence the variable,
    # and hence the import here, after it.
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    from ucxx._lib import libucxx
    from ucxx._lib.arr import Array

    return libucxx, Array


def _settings(tls: str) -> dict[str, str]:
    # Without it UCX takes no shared memory for endpoints that can fail. Receiver-driven single copy (CMA) stays off on
    # purpose: it would read a sender's blocks after the sender has closed its endpoint and reused them.
    settings = {"MM_ERROR_HANDLING": "y"}
    if tls:
        settings["TLS"] = tls
    return settings


class UcxCompletion:
    """Holds the memory's buffer export for as long as UCX may use it."""

    def __init__(self, request: Any, array: Any) -> None:
        self._request = request
        self._array = array

    def done(self) -> bool:
        return bool(self._request.completed)

    def failed(self) -> bool:
        try:
            self._request.check_error()
        except Exception:
            return True
        return False


class UcxLink:
    def __init__(self, ucx: Any, array: Any, context: Any) -> None:
        self._ucx = ucx
        self._array = array
        self._any_tag = ucx.UCXXTag(0)
        self._any_mask = ucx.UCXXTagMask(0)
        self._endpoint: Any = None
        self._inflight: list[UcxCompletion] = []
        try:
            self._worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            self._worker.init_blocking_progress_mode()
            self.address: bytes = self._worker.address.tobytes()
        except Exception as exc:
            raise TransferError(f"UCX cannot make a worker: {exc}") from exc

    def connect(self, address: bytes) -> None:
        try:
            remote = self._ucx.UCXAddress.create_from_buffer(address)
            self._endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
                self._worker, remote, endpoint_error_handling=True
            )
        except Exception as exc:
            raise TransferError(f"UCX cannot reach the other engine: {exc}") from exc

    def send(self, block: memoryview, tag: int, index: int) -> UcxCompletion:
        array = self._array(block)
        try:
            request = self._endpoint.tag_send(array, self._ucx.UCXXTag(tag << INDEX_BITS | index))
        except Exception as exc:
            raise PeerLost(f"UCX cannot send: {exc}") from exc
        return self._track(UcxCompletion(request, array))

    def probe(self) -> Arrival | None:
        found = self._worker.tag_probe(self._any_tag, self._any_mask, True)
        if not found.matched:
            return None
        tag: int = found.sender_tag.value
        return Arrival(tag >> INDEX_BITS, tag & _INDEX_MASK, found.length, found)

    def receive(self, arrival: Arrival, into: memoryview) -> UcxCompletion:
        array = self._array(into)
        try:
            request = self._worker.tag_recv_with_handle(array, arrival.handle)
        except Exception as exc:
            raise PeerLost(f"UCX cannot receive: {exc}") from exc
        return self._track(UcxCompletion(request, array))

    def _track(self, completion: UcxCompletion) -> UcxCompletion:
        self._inflight.append(completion)
        return completion

    def progress(self) -> bool:
        step = self._worker.progress_once
        moved = False
        for _ in range(_PROGRESS_AT_ONCE):
            if not step():
                break
            moved = True
        if moved and self._inflight:
            self._inflight = [completion for completion in self._inflight if not completion.done()]
        return moved

    def arm(self) -> bool:
        return bool(self._worker.arm())

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    def broken(self) -> bool:
        return self._endpoint is not None and not self._endpoint.alive

    def close(self) -> None:
        if self._worker is None:
            return
        worker, endpoint, inflight = self._worker, self._endpoint, self._inflight
        self._worker, self._endpoint, self._inflight = None, None, []
        if endpoint is not None:
            try:
                endpoint.close_blocking(1_000_000, 100)
            except Exception:
                log.exception("UCX did not close an endpoint")
        for _ in range(_CLOSE_ROUNDS):
            # progress(), unlike progress_once(), also lets ucxx forget the requests that it has cancelled.
            worker.progress()
            if all(completion.done() for completion in inflight):
                return
        # A peer that was killed with its shared-memory queue full: UCX waits for room in it for ever. The data is moved
        # by progress calls alone, and this worker gets none any more; ucxx keeps its file descriptors until we exit.
        stuck = sum(not completion.done() for completion in inflight)
        log.warning("giving up a UCX worker with %d operations that cannot end", stuck)


class UcxTransport:
    """One UCX context. ``tls`` is as ``UCX_TLS`` takes it; empty lets UCX choose. Raises TransferError."""

    def __init__(self, tls: str) -> None:
        self._ucx, self._array = _load()
        try:
            self._context: Any = self._ucx.UCXContext(
                _settings(tls), feature_flags=(self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
            )
        except Exception as exc:
            raise TransferError(f"UCX cannot start with transports {tls or 'of its choice'}: {exc}") from exc

    def open_link(self) -> UcxLink:
        return UcxLink(self._ucx, self._array, self._context)

    def close(self) -> None:
        self._context = None
