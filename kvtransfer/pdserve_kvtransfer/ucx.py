"""Blocks over UCX: shared memory inside one host, TCP or RDMA between hosts, whatever UCX finds best.

A link is one UCX worker for each engine on the other side, rather than one for all: UCX can end a receive whose data
has begun to move only by closing the endpoint that it came from, and what cannot be ended even so only by destroying
the worker. Nobody else's transfers are on that worker.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Any

from pdserve.config import TransferConfig
from pdserve.errors import PeerLost, TransferError
from pdserve.wire.transfer import INDEX_BITS
from pdserve_kvtransfer.in_flight import InFlight
from pdserve_kvtransfer.transport import Arrival
from pdserve_kvtransfer.ucx_lanes import Lane, lanes_of, parse_resources

log = logging.getLogger(__name__)

_INDEX_MASK = (1 << INDEX_BITS) - 1
_PROGRESS_AT_ONCE = 256
_CLOSE_ROUNDS = 200
_CLOSE_WAIT_NS = 100_000_000
_LIBUCP = "libucp.so.0"


def _load() -> tuple[Any, Any]:
    # ucxx sets variables that this UCX has no use for, and UCX would complain about them on stderr: hence the first,
    # and hence the import here, after it. The others keep a peer's death off stderr: it is in our own log.
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCXX_LOG_LEVEL", "fatal")
    from ucxx._lib import libucxx
    from ucxx._lib.arr import Array

    return libucxx, Array


def _settings(tls: str, net_devices: str, tcp_ports: str) -> dict[str, str]:
    # Without it UCX takes no shared memory for endpoints that can fail. Receiver-driven single copy (CMA) stays off on
    # purpose: it would read a sender's blocks after the sender has closed its endpoint and reused them.
    settings = {"MM_ERROR_HANDLING": "y"}
    wanted = {"TLS": tls, "NET_DEVICES": net_devices, "TCP_PORT_RANGE": tcp_ports}
    return settings | {name: value for name, value in wanted.items() if value}


def ucx_version() -> str:
    """Of the library that is loaded. Raises TransferError if none can be."""
    try:
        ucx, _ = _load()
    except (ImportError, OSError) as exc:
        raise TransferError(f"UCX cannot be loaded: {exc}") from exc
    return ".".join(str(part) for part in ucx.get_ucx_version())


class UcxCompletion:
    """Holds the memory's buffer export for as long as UCX may use it."""

    __slots__ = ("_array", "request")

    def __init__(self, request: Any, array: Any) -> None:
        self.request = request
        self._array = array

    def done(self) -> bool:
        return bool(self.request.completed)

    def failed(self) -> bool:
        try:
            self.request.check_error()
        except Exception:
            return True
        return False


class UcxLink:
    def __init__(self, ucx: Any, array: Any, context: Any) -> None:
        self._ucx = ucx
        self._array = array
        self._any_tag = ucx.UCXXTag(0)
        self._any_mask = ucx.UCXXTagMask(0)
        self._endpoints: list[Any] = []
        self._sends: InFlight[UcxCompletion] = InFlight()
        self._receives: InFlight[UcxCompletion] = InFlight()
        try:
            self._worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            self._worker.init_blocking_progress_mode()
            self.address: bytes = self._worker.address.tobytes()
        except Exception as exc:
            raise TransferError(f"UCX cannot make a worker: {exc}") from exc

    def connect(self, addresses: Sequence[bytes]) -> None:
        connect = self._ucx.UCXEndpoint.create_from_worker_address
        try:
            for address in addresses:
                remote = self._ucx.UCXAddress.create_from_buffer(address)
                self._endpoints.append(connect(self._worker, remote, endpoint_error_handling=True))
        except Exception as exc:
            raise TransferError(f"UCX cannot reach the other engine: {exc}") from exc

    def send(self, block: memoryview, tag: int, index: int, to: int = 0) -> UcxCompletion:
        array = self._array(block)
        try:
            request = self._endpoints[to].tag_send(array, self._ucx.UCXXTag(tag << INDEX_BITS | index))
        except Exception as exc:
            raise PeerLost(f"UCX cannot send: {exc}") from exc
        completion = UcxCompletion(request, array)
        if not completion.done():
            self._sends.add(completion)
        return completion

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
        completion = UcxCompletion(request, array)
        if not completion.done():
            self._receives.add(completion)
        return completion

    def progress(self) -> bool:
        step = self._worker.progress_once
        moved = False
        for _ in range(_PROGRESS_AT_ONCE):
            if not step():
                break
            moved = True
        if moved:
            # So that the memory of what has ended is let go of.
            self._sends.take_done()
            self._receives.take_done()
        return moved

    def arm(self) -> bool:
        return bool(self._worker.arm())

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    def broken(self) -> bool:
        return not all(endpoint.alive for endpoint in self._endpoints)

    def lanes(self) -> tuple[Lane, ...]:
        """Which transports carry the blocks; complete once something has gone over each connection."""
        return tuple(dict.fromkeys(lane for endpoint in self._endpoints for lane in lanes_of(endpoint.handle)))

    def close(self) -> None:
        if self._worker is None:
            return
        self.progress()
        worker, endpoints = self._worker, self._endpoints
        sends = [send for send in self._sends.take_all() if not send.done()]
        receives = self._receives.take_all()
        self._worker, self._endpoints = None, []
        for endpoint in endpoints:
            try:
                endpoint.close_blocking(_CLOSE_WAIT_NS, 1)
            except Exception:
                log.exception("UCX did not close an endpoint")
        for _ in range(_CLOSE_ROUNDS):
            # progress(), unlike progress_once(), also lets ucxx forget the requests that it has cancelled.
            worker.progress()
            if all(completion.done() for completion in (*sends, *receives)):
                break
        if sends or not all(receive.done() for receive in receives):
            _destroy(worker, *endpoints, *(completion.request for completion in (*sends, *receives)))


def _destroy(worker: Any, *users: Any) -> None:
    """Free what a worker holds although something is in flight on it, or ucxx believes so.

    ucxx frees a worker with the last request on it. An endpoint that is closed while it sends keeps those requests for
    ever, and UCX itself never ends a send into the full shared-memory queue of a peer that was killed. So the worker is
    destroyed beneath ucxx, whose objects must then never be finalised: they would touch it again.
    """
    epoll = worker.epoll_file_descriptor
    ctypes.CDLL(_LIBUCP).ucp_worker_destroy(ctypes.c_void_p(worker.handle))
    os.close(epoll)
    for kept in (worker, *users):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class UcxTransport:
    """One UCX context. Raises TransferError.

    ``tls``, ``net_devices`` and ``tcp_ports`` are as ``UCX_TLS``, ``UCX_NET_DEVICES`` and ``UCX_TCP_PORT_RANGE`` take
    them; where one is empty, UCX chooses. A link listens on one TCP port for each network device that it may use.
    """

    def __init__(self, tls: str, net_devices: str = "", tcp_ports: str = "") -> None:
        self._ucx, self._array = _load()
        try:
            self._context: Any = self._ucx.UCXContext(
                _settings(tls, net_devices, tcp_ports), feature_flags=(self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
            )
        except Exception as exc:
            raise TransferError(f"UCX cannot start with transports {tls or 'of its choice'}: {exc}") from exc

    def resources(self) -> tuple[Lane, ...]:
        """Every transport and device that links may use."""
        return parse_resources(self._context.info)

    def open_link(self) -> UcxLink:
        return UcxLink(self._ucx, self._array, self._context)

    def close(self) -> None:
        self._context = None


def configured_ucx(config: TransferConfig) -> UcxTransport:
    """As the settings say. Raises TransferError."""
    return UcxTransport(config.ucx_tls, config.ucx_net_devices, config.ucx_tcp_ports)
