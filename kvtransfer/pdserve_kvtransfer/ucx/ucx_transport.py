"""Links over UCX, which takes shared memory inside one host, and TCP or RDMA between hosts, as it finds best.

Each link has a UCX worker of its own, and not all links one together. UCX can end a receive whose data has begun to
move only by closing the endpoint that it came from. If that does not end it either, only destroying the worker does,
and no other engine's transfers are on that worker.

A *poster* posts the messages of a link. ``CompiledPoster`` posts a batch of them in one call. ``UcxxPoster`` needs five
calls for each message, but no compiler.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from pdserve.errors import TransferError
from pdserve.wire.discovery import TransportKind
from pdserve.wire.transfer import LinkAddress, MemoryOffer
from pdserve_kvtransfer.region import Memory
from pdserve_kvtransfer.transport import ArrivedMessage, LinkPath, MovedMessage, StepUnderWay
from pdserve_kvtransfer.ucx.rdma_ports import read_rdma, why_no_rdma
from pdserve_kvtransfer.ucx.ucx_library import (
    LIBUCP,
    SHARED_MEMORY,
    Lane,
    lanes_of,
    load_ucxx,
    loaded_ucx,
    parse_resources,
)
from pdserve_kvtransfer.ucx.ucxx_poster import UcxxPoster


class Poster(Protocol):
    """Posts the messages of one UCX worker. Endpoints and worker are ucxx's objects and outlive the poster.

    Methods without a docstring are those of a ``Link``.
    """

    @property
    def attached(self) -> int:
        """How many ends of links have blocks that the receiver copies out of the sender's memory, not through UCX."""

    def offer(self) -> MemoryOffer | None:
        """Returns what other links may read of this memory until ``end``. It is called at most once."""

    def add_endpoint(self, endpoint: Any, address: LinkAddress, own: int) -> None:
        """Adds the next endpoint, before the first message to it. The memory that it offers may be mapped.

        ``address`` is the other side's address. ``own`` is the ``link`` of this side's address.
        """

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        """``to`` counts the endpoints in the order in which they were added."""

    def progress(self) -> bool: ...

    def sent(self) -> Sequence[MovedMessage]: ...

    def arrivals(self) -> Sequence[ArrivedMessage]: ...

    def receive(self, places: Sequence[int]) -> None: ...

    def landed(self) -> Sequence[MovedMessage]: ...

    def settled(self) -> bool:
        """Returns whether everything that is over was reported. It must be asked before sleeping."""

    def end(self, close_endpoints: Callable[[], None]) -> bool:
        """Closes the endpoints and lets what is in flight end.

        Returns False if some of it does not end. The worker must then be destroyed.
        """

    def free(self) -> None:
        """Frees the poster, after ``end`` and after the worker is destroyed, if it is."""


MakePoster: TypeAlias = Callable[[Any, Any, Memory], Poster]
"""Makes a poster of ``(context, worker, memory)``.

It raises TransferError if the poster cannot reach that kind of memory.
"""


log = logging.getLogger(__name__)

_CLOSE_WAIT_NS = 100_000_000

_PAST_THE_END = bytes(65_536)
_READS_AFTER_THE_END = "cuda_ipc"
"""With this transport the receiver maps the sender's GPU memory and reads it even after the sender has closed its
endpoint.
"""
_WITHOUT_IT = {"all": f"^{_READS_AFTER_THE_END}", "cuda": "cuda_copy,gdr_copy"}


def allowed_transports(tls: str) -> str:
    """Returns ``tls``, which has the form of ``UCX_TLS``, without CUDA IPC. Raises TransferError if it names CUDA IPC.

    A decode engine that lost its lease in the middle of a copy would go on reading a prefill engine's blocks when they
    belong to another request, and nothing would show that.
    """
    if tls.startswith("^"):
        return tls if _READS_AFTER_THE_END in tls[1:].split(",") else f"{tls},{_READS_AFTER_THE_END}"
    names = [name.strip() for name in (tls or "all").split(",")]
    if any(name.lstrip("\\").partition(":")[0] == _READS_AFTER_THE_END for name in names):
        raise TransferError(
            f"UCX transport {_READS_AFTER_THE_END} is refused: the other GPU would go on reading KV blocks after they "
            "were given to another request; cuda_copy moves them safely"
        )
    return _WITHOUT_IT["all"] if "all" in names else ",".join(_WITHOUT_IT.get(name, name) for name in names)


def _settings(tls: str, net_devices: str, tcp_ports: str, rails: int) -> dict[str, str]:
    # Without this setting UCX takes no shared memory for endpoints that can fail. Receiver-driven single copy (CMA)
    # stays off: it would read a sender's blocks after the sender has closed its endpoint and reused them.
    settings = {"MM_ERROR_HANDLING": "y"}
    wanted = {"TLS": tls, "NET_DEVICES": net_devices, "TCP_PORT_RANGE": tcp_ports}
    if rails:
        # A block over RDMA goes by the first, and one over TCP, whose rendezvous sends the eager way, by the second.
        wanted |= {"MAX_RNDV_RAILS": str(rails), "MAX_EAGER_RAILS": str(rails)}
    return settings | {name: value for name, value in wanted.items() if value}


class UcxLink:
    """A ``transport.Link`` over UCX.

    The context must be the link's own. A context remembers which memory is registered, and with it the requests that
    wait until no other one uses it. A link that is destroyed by force leaves such requests behind, and the next link of
    the same context that lets go of the memory would write into them.
    """

    def __init__(
        self, ucx: Any, context: Any, memory: Memory, make_poster: MakePoster, shares: bool, no_rdma: Callable[[], str]
    ) -> None:
        """``shares`` says whether it may offer its memory. ``no_rdma`` says why it would not go by RDMA."""
        self._ucx = ucx
        self._no_rdma = no_rdma
        self._endpoints: list[Any] = []
        self._own = secrets.randbelow(2**62 - 1) + 1
        try:
            self._worker = ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            self._worker.init_blocking_progress_mode()
            self._worker_address: bytes = self._worker.address.tobytes()
        except Exception as exc:
            raise TransferError(f"UCX cannot make a worker: {exc}") from exc
        self.poster = make_poster(context, self._worker, memory)
        offer = self.poster.offer() if shares else None
        self._shares = shares
        self.address = msgspec.msgpack.encode(LinkAddress(self._worker_address, self._own, offer))
        # A link's hot calls are its poster's own methods: each chunk of blocks pays for every layer in between.
        self.send = self.poster.send
        self.progress = self.poster.progress
        self.sent = self.poster.sent
        self.arrivals = self.poster.arrivals
        self.receive = self.poster.receive
        self.landed = self.poster.landed

    def connect(self, addresses: Sequence[bytes]) -> None:
        try:
            for address in addresses:
                self._connect(msgspec.msgpack.decode(address, type=LinkAddress))
        except Exception as exc:
            raise TransferError(f"UCX cannot reach the other engine: {exc}") from exc

    def _connect(self, address: LinkAddress) -> None:
        # UCX aborts the process for an address in a form that it does not know. The first byte's low half tells it.
        if not address.worker or (address.worker[0] ^ self._worker_address[0]) & 0x0F:
            raise ValueError("its UCX gives addresses in another form than this one's")
        # UCX does not know how long an address is. It would read past the end of a truncated one, as if the bytes there
        # belonged to it. In zeros it finds no transport, and refuses the address.
        remote = self._ucx.UCXAddress.create_from_buffer(address.worker + _PAST_THE_END)
        connect = self._ucx.UCXEndpoint.create_from_worker_address
        endpoint = connect(self._worker, remote, endpoint_error_handling=True)
        self._endpoints.append(endpoint)
        self.poster.add_endpoint(
            endpoint, address if self._shares else LinkAddress(address.worker, address.link), self._own
        )

    def arm(self) -> bool:
        return self.poster.settled() and bool(self._worker.arm())

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    def broken(self) -> bool:
        return not all(endpoint.alive for endpoint in self._endpoints)

    def lanes(self) -> tuple[Lane, ...]:
        """Returns the lanes that carry the blocks. They are complete once something has gone over each connection."""
        return tuple(dict.fromkeys(lane for endpoint in self._endpoints for lane in lanes_of(endpoint.handle)))

    def path(self) -> LinkPath:
        if self._endpoints and self.poster.attached == len(self._endpoints):
            return LinkPath(TransportKind.MAPPED, "mapped memory of the sender")
        lanes = self.lanes()
        kind = _slowest(lanes_of(endpoint.handle) for endpoint in self._endpoints)
        names = ", ".join(map(str, lanes)) or "what UCX does not name"
        return LinkPath(kind, names, self._no_rdma() if kind is TransportKind.TCP else "")

    def close(self) -> None:
        if self._worker is None:
            return
        worker, endpoints = self._worker, self._endpoints
        self._worker, self._endpoints = None, []
        worker.progress()
        if not self.poster.end(lambda: _close(endpoints)):
            _destroy(worker, *endpoints)
        self.poster.free()


_BEST_FIRST = (TransportKind.SHARED_MEMORY, TransportKind.RDMA, TransportKind.TCP, TransportKind.OTHER)


def _slowest(connections: Iterable[Sequence[Lane]]) -> TransportKind:
    """Returns what carries the blocks of the worst connection. UCX gives a connection's blocks to its best lanes."""
    best = (min(map(_BEST_FIRST.index, (lane.kind for lane in lanes)), default=-1) for lanes in connections)
    return _BEST_FIRST[max(best, default=-1)]


def _close(endpoints: Sequence[Any]) -> None:
    for endpoint in endpoints:
        try:
            endpoint.close_blocking(_CLOSE_WAIT_NS, 1)
        except Exception:
            log.exception("UCX did not close an endpoint")


def _destroy(worker: Any, *users: Any) -> None:
    """Frees a worker although something is in flight on it, or ucxx believes so.

    ucxx frees a worker with the last request on it. An endpoint that is closed while it sends keeps those requests for
    ever, and UCX never ends a send into the full shared-memory queue of a killed peer. So the worker is
    destroyed beneath ucxx, whose objects must then never be finalised: they would touch it again. So the link's context
    stays until this process ends, with the memory that it has registered.
    """
    log.warning(
        "a link was lost in the middle of a transfer: what UCX has registered for it stays until this process ends"
    )
    epoll = worker.epoll_file_descriptor
    ctypes.CDLL(LIBUCP).ucp_worker_destroy(ctypes.c_void_p(worker.handle))
    os.close(epoll)
    for kept in (worker, *users):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class UcxTransport:
    """A ``transport.Transport`` over UCX. The constructor raises TransferError.

    ``tls``, ``net_devices`` and ``tcp_ports`` have the forms of ``UCX_TLS``, ``UCX_NET_DEVICES`` and
    ``UCX_TCP_PORT_RANGE``. UCX chooses for one that is empty, but it never takes CUDA IPC. A link listens on one TCP
    port for each network device that it may use. A message goes over at most ``rails`` devices; 0 lets UCX choose.
    ``make_poster`` is ``PosterLibrary.poster`` or ``UcxxPoster``.
    """

    def __init__(
        self,
        tls: str,
        net_devices: str = "",
        tcp_ports: str = "",
        *,
        rails: int = 0,
        make_poster: MakePoster = UcxxPoster,
    ) -> None:
        tls = allowed_transports(tls or os.environ.get("UCX_TLS", ""))
        self.step = StepUnderWay()
        self._ucx = load_ucxx()
        self._loaded = loaded_ucx()
        log.info("%s moves KV blocks", self._loaded)
        self._make_poster = make_poster
        self._devices = net_devices or os.environ.get("UCX_NET_DEVICES", "")
        self._tls = tls
        self._settings = _settings(tls, net_devices, tcp_ports, rails)
        self._resources = parse_resources(self._context().info)
        self._shares = any(lane.transport in SHARED_MEMORY for lane in self._resources)

    def _context(self) -> Any:
        features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
        try:
            return self._ucx.UCXContext(self._settings, feature_flags=features)
        except Exception as exc:
            raise TransferError(f"UCX cannot start with transports {self._tls or 'of its choice'}: {exc}") from exc

    def resources(self) -> tuple[Lane, ...]:
        """Returns every transport and device that links may use."""
        return self._resources

    def open_link(self, memory: Memory) -> UcxLink:
        return UcxLink(self._ucx, self._context(), memory, self._make_poster, self._shares, self._why_no_rdma)

    def _why_no_rdma(self) -> str:
        return why_no_rdma(read_rdma(), self._resources, self._loaded, self._tls, self._devices)

    def close(self) -> None:
        """Does nothing: each link closes what it has opened."""
