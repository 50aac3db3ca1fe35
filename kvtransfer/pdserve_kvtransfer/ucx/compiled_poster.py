"""The poster in C++ (``csrc``), which needs one call to post a batch and one for all that a turn finds."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdserve.compiled_library import BuildError, Recipe, built_library
from pdserve.errors import PeerLost, TransferError
from pdserve.wire.transfer import LinkAddress, MemoryOffer
from pdserve_kvtransfer.pieces import CompiledXxhash, compiled_xxhash
from pdserve_kvtransfer.region import DeviceMemory, Memory, SharedMemory, open_offered
from pdserve_kvtransfer.transport import DISCARD, ArrivedMessage, MovedMessage
from pdserve_kvtransfer.ucx.ucx_library import LoadedUcx, loaded_ucx

log = logging.getLogger(__name__)

_ROOM = 256
_PROGRESS_AT_ONCE = 64
"""How many fragments (8 KiB each in shared memory) one call moves: so few that landed bytes are still in a cache
when they are checked.
"""
_END_ROUNDS = 200
_NOWHERE = 2**64 - 1
_Numbers = ctypes.c_uint64 * _ROOM
_FAILURES = {
    1: "the other side has closed the link that a block was copied from",
    2: "the other side sent what no link sends",
    -3: "an input or output error (UCX -3)",
    -6: "the other side is unreachable (UCX -6)",
    -20: "UCX waited too long (UCX -20)",
    -23: "the other side rejected it (UCX -23)",
    -24: "the connection does not stand (UCX -24)",
    -25: "the other side's process has ended, or closed the connection (UCX -25)",
    -80: "the other side does not answer any more (UCX -80)",
}
"""What statuses mean: the compiled code's own, and UCX's, which are negative."""


class _Batch(ctypes.Structure):
    """``Batch`` of csrc/poster.h."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("labels", _Numbers),
        ("places", _Numbers),
        ("lengths", _Numbers),
        ("digests", _Numbers),
    )


class _Board(ctypes.Structure):
    """``Board`` of csrc/poster.h."""

    _fields_ = (
        ("status", ctypes.c_int64),
        ("in_flight", ctypes.c_uint64),
        ("attached", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("sent", _Batch),
        ("landed", _Batch),
        ("arrived", _Batch),
    )


class PosterLibrary:
    """The functions of csrc/poster.cpp, which call the loaded UCX."""

    def __init__(self, cache_dir: Path, digests: bool, registers: bool = True) -> None:
        """Compiles the library on its first use below ``cache_dir``, in about a second.

        With ``digests`` posters compute digests of landed messages. With ``registers`` they register their memory with
        the network devices as a whole. Raises BuildError.
        """
        self.registers = registers
        self.xxhash = compiled_xxhash() if digests else None
        try:
            loaded = loaded_ucx()
        except TransferError as exc:
            raise BuildError(str(exc)) from exc
        path = built_library(recipe(loaded), cache_dir)
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        try:
            # Posting takes less time than giving the interpreter's lock away and getting it back.
            quick = ctypes.PyDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
            # Progress copies blocks. Other threads may run meanwhile.
            slow = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
            self.open = _function(
                quick, "pdserve_poster_open", [pointer, pointer, number, pointer, pointer, pointer], pointer
            )
            # It pins the whole cache, which may take seconds, and other threads decode meanwhile.
            self.register = _function(slow, "pdserve_poster_register", [pointer, pointer], ctypes.c_int)
            self.free = _function(quick, "pdserve_poster_free", [pointer], None)
            self.send = _function(
                quick, "pdserve_poster_send", [pointer, pointer, number, pointer, number, pointer], ctypes.c_int
            )
            self.receive = _function(quick, "pdserve_poster_receive", [pointer, pointer], ctypes.c_int)
            self.offer = _function(quick, "pdserve_poster_offer", [pointer, number, number], None)
            self.withdraw = _function(quick, "pdserve_poster_withdraw", [pointer], None)
            self.add_endpoint = _function(quick, "pdserve_poster_add_endpoint", [pointer, pointer, number], None)
            self.attach = _function(
                quick,
                "pdserve_poster_attach",
                [pointer, pointer, number, ctypes.c_int, number, number, number],
                ctypes.c_int,
            )
            self.probe = _function(quick, "pdserve_poster_probe", [pointer], None)
            self.progress = _function(slow, "pdserve_poster_progress", [pointer, ctypes.c_int], ctypes.c_int)
        except (OSError, AttributeError) as exc:
            raise BuildError(f"the compiled UCX calls cannot be loaded: {exc}") from exc

    def poster(self, context: Any, worker: Any, memory: Memory) -> CompiledPoster:
        return CompiledPoster(self, context, worker, memory)


def recipe(loaded: LoadedUcx) -> Recipe:
    """Returns how the calls are compiled for the library that will run them. Raises BuildError without its headers."""
    if loaded.include is None:
        raise BuildError(f"the headers of {loaded} are not beside it: ucp/api/ucp.h is missing")
    return Recipe(
        name="ucx-calls",
        sources=Path(__file__).parent / "csrc",
        # The version is part of the library's key: another UCX in the same folder has other headers.
        compile_flags=("-std=c++17", "-O2", "-fPIC", f"-DUCX_VERSION={loaded.version}", f"-I{loaded.include}"),
        # By its soname this is the library that is already loaded.
        link_flags=(f"-L{loaded.folder}", "-l:libucp.so.0"),
    )


def _function(library: ctypes.CDLL, name: str, arguments: list[Any], result: Any) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    return function


class CompiledPoster:
    """A ``poster.Poster`` in compiled code."""

    def __init__(self, library: PosterLibrary, context: Any, worker: Any, memory: Memory) -> None:
        self._library = library
        # The memory must live for as long as UCX may use it.
        self._memory = memory
        # The export of host memory has its address, and keeps it from being resized.
        self._exported = memory if isinstance(memory, DeviceMemory) else _exported(memory)
        self._board = _Board()
        board, self._digests = ctypes.addressof(self._board), library.xxhash is not None
        xxhash = library.xxhash or CompiledXxhash(None, None)
        self._handle = library.open(
            worker.handle, _address(self._exported), memory.nbytes, board, xxhash.digest, xxhash.secret
        )
        if library.registers:
            self._register(context)
        self._offer: MemoryOffer | None = None
        self._sent, self._landed, self._arrived = self._board.sent, self._board.landed, self._board.arrived
        self._places, self._labels = _Numbers(), _Numbers()
        self._endpoints: list[Any] = []

    def _register(self, context: Any) -> None:
        began = time.monotonic()
        status = self._library.register(self._handle, context.handle)
        if status:
            log.warning(
                "UCX cannot register %d MiB of KV blocks with the network devices (status %d), so each block is "
                "registered when it first moves: see ulimit -l",
                self._memory.nbytes // 2**20,
                status,
            )
        else:
            log.debug("%d bytes of KV blocks registered in %.3f s", self._memory.nbytes, time.monotonic() - began)

    def offer(self) -> MemoryOffer | None:
        if isinstance(self._memory, SharedMemory):
            self._offer = self._memory.offer()
        if self._offer is not None:
            self._library.offer(self._handle, self._offer.cell, self._offer.nonce)
        return self._offer

    def add_endpoint(self, endpoint: Any, address: LinkAddress, own: int) -> None:
        self._endpoints.append(endpoint)
        self._library.add_endpoint(self._handle, endpoint.handle, address.link)
        if isinstance(self._memory, DeviceMemory):
            return
        offer = address.offer
        file = None if offer is None else open_offered(offer)
        if offer is None or file is None:
            return
        cell, nonce = offer.cell, offer.nonce
        try:
            failed = self._library.attach(self._handle, endpoint.handle, own, file, offer.nbytes, cell, nonce)
        finally:
            os.close(file)
        self._check()
        if not failed:
            log.info("blocks of process %d are copied out of its memory", offer.pid)

    @property
    def attached(self) -> int:
        """How many ends of links have blocks that are copied out of the sender's memory."""
        count: int = self._board.attached
        return count

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        endpoint = self._endpoints[to].handle
        for start in range(0, len(places), _ROOM):
            count = min(_ROOM, len(places) - start)
            self._places[:count] = list(places[start : start + count])
            self._labels[:count] = list(labels[start : start + count])
            if self._library.send(self._handle, endpoint, count, self._places, length, self._labels):
                raise ValueError(f"some of these messages of {length} bytes are outside of the memory")
        self._check()

    def progress(self) -> bool:
        news = bool(self._library.progress(self._handle, _PROGRESS_AT_ONCE))
        self._check()
        return news

    def _check(self) -> None:
        if self._board.status:
            status = self._board.status
            raise PeerLost(f"a message could not be moved: {_FAILURES.get(status, f'UCX says {status}')}")

    def sent(self) -> Sequence[MovedMessage]:
        return _taken(self._sent)

    def landed(self) -> Sequence[MovedMessage]:
        return _taken(self._landed, self._digests)

    def arrivals(self) -> Sequence[ArrivedMessage]:
        self._library.probe(self._handle)
        count = self._arrived.count
        return list(map(ArrivedMessage, self._arrived.labels[:count], self._arrived.lengths[:count])) if count else ()

    def receive(self, places: Sequence[int]) -> None:
        self._places[: len(places)] = [_NOWHERE if place == DISCARD else place for place in places]
        if self._library.receive(self._handle, self._places):
            raise ValueError("a message was to land outside of the memory")
        self._check()

    def settled(self) -> bool:
        return not self._board.hidden

    def end(self, close_endpoints: Callable[[], None]) -> bool:
        self._library.withdraw(self._handle)
        self._endpoints = []
        close_endpoints()
        for _ in range(_END_ROUNDS):
            if not self._board.in_flight:
                return True
            self._library.progress(self._handle, _PROGRESS_AT_ONCE)
        return False

    def free(self) -> None:
        handle, self._handle = self._handle, None
        self._library.free(handle)
        if self._offer is not None and isinstance(self._memory, SharedMemory):
            self._memory.take_back(self._offer)
            self._offer = None


def _exported(memory: memoryview | SharedMemory) -> ctypes.Array[ctypes.c_char]:
    own = memory.bytes if isinstance(memory, SharedMemory) else memory
    return (ctypes.c_char * own.nbytes).from_buffer(own)


def _address(memory: DeviceMemory | ctypes.Array[ctypes.c_char]) -> int:
    return memory.address if isinstance(memory, DeviceMemory) else ctypes.addressof(memory)


def _taken(batch: _Batch, digests: bool = False) -> Sequence[MovedMessage]:
    count: int = batch.count
    if not count:
        return ()
    batch.count = 0
    columns = [batch.labels[:count], batch.places[:count], batch.lengths[:count]]
    if digests:
        columns.append(batch.digests[:count])
    return list(map(MovedMessage, *columns))
