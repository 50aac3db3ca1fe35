"""The KV cache as transfers see it: numbered blocks of bytes in host memory or in a device's memory.

Host memory may be shared: then other processes of the same user map and read it. Shared memory is a memfd: it has no
name in any file system, needs no space in ``/dev/shm``, and is freed with the last process that maps it, however that
process ends. It is sealed: no other process may write to it, and none may shrink it, so a process that reads a mapping
of it cannot read past its end.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pdserve.machine.file_system import file_system
from pdserve.wire.transfer import CELLS, MemoryOffer

HEAD_BYTES = 4096
"""The page before the memory, which has ``CELLS`` numbers of 64 bits."""

_NAME = "pdserve-kv-"
_TMPFS = 0x01021994
_NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_F_SEAL_FUTURE_WRITE = 0x10
_MADV_POPULATE_WRITE = 23
_SEALS = _NEEDED_SEALS | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_KERNEL_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_IPC_NAMESPACE = Path("/proc/self/ns/ipc")


class SharedMemory:
    """Zeroed memory, freed with the last reference to it or to its ``bytes``.

    All of it is taken from the machine at once. The constructor raises OSError if the machine has less memory.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes > _physical_bytes():
            raise OSError(errno.ENOMEM, f"{nbytes} bytes are more than the memory of this machine")
        self.nbytes = nbytes
        self._name = secrets.token_hex(16)
        self._fd = os.memfd_create(_NAME + self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd)
        # Memory that is not there shows now, and not when the cache fills.
        if _gives_huge_pages():
            os.ftruncate(self._fd, HEAD_BYTES + nbytes)
            mapping = mmap.mmap(self._fd, HEAD_BYTES + nbytes)
            _populate(mapping)
        else:
            # Small pages are taken here, and zeroed when they are first used: a fifth of the time, before the first
            # request.
            os.posix_fallocate(self._fd, 0, HEAD_BYTES + nbytes)
            mapping = mmap.mmap(self._fd, HEAD_BYTES + nbytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self.bytes = memoryview(mapping)[HEAD_BYTES:]
        self._free_cells = list(reversed(range(CELLS)))

    def offer(self) -> MemoryOffer | None:
        """Returns an offer for one more link, or None if too many have one. ``take_back`` must end it."""
        if not self._free_cells:
            return None
        nonce = secrets.randbelow(2**62 - 1) + 1
        return MemoryOffer(os.getpid(), self._fd, self._name, self.nbytes, self._free_cells.pop(), nonce)

    def take_back(self, offer: MemoryOffer) -> None:
        """Ends an offer, whose cell must be empty."""
        self._free_cells.append(offer.cell)


def _gives_huge_pages() -> bool:
    """Returns whether this machine has huge pages for shared memory that asks for them."""
    try:
        return re.search(r"\[(always|within_size|advise|force)\]", _HUGE_PAGES.read_text()) is not None
    except OSError:
        return False


def _populate(mapping: mmap.mmap) -> None:
    """Takes the memory of a mapping, in huge pages where they can be had."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # A kernel before 5.14 does not know the advice to populate.
            raise


def open_offered(offer: MemoryOffer) -> int | None:
    """Returns a file descriptor to map the memory from, or None if this process cannot or must not map it.

    The memory cannot be reached from other hosts, from containers with other process ids, or by other users. The caller
    closes the descriptor.
    """
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    try:
        # If process ids mean something else here, the path leads to another file. Opening that could have any effect.
        if offer.nbytes > _physical_bytes() or not _named(path, offer):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    if _is(fd, offer):
        return fd
    os.close(fd)
    return None


def _named(path: str, offer: MemoryOffer) -> bool:
    return re.fullmatch(rf"/memfd:{_NAME}{offer.name}( \(deleted\))?", os.readlink(path)) is not None


def _is(fd: int, offer: MemoryOffer) -> bool:
    try:
        named = _named(f"/proc/self/fd/{fd}", offer)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        kind = file_system(fd)
    except OSError:
        return False
    whole = seals & _NEEDED_SEALS == _NEEDED_SEALS and os.fstat(fd).st_size == HEAD_BYTES + offer.nbytes
    # In a hugetlbfs file a page that was never written may be one that the machine does not have, and reading it raises
    # SIGBUS.
    return named and whole and kind == _TMPFS


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """What tells whether two processes can share memory. A field is empty if the system does not tell it."""

    machine: str
    ipc_namespace: str


def machine_identity() -> MachineIdentity:
    """Returns the identity of the machine that this process runs on."""
    try:
        return MachineIdentity(_KERNEL_BOOT.read_text().strip(), os.readlink(_IPC_NAMESPACE))
    except OSError:
        return MachineIdentity("", "")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU, which this process can address but not read. Its maker keeps them allocated."""

    address: int
    nbytes: int


Memory: TypeAlias = memoryview | SharedMemory | DeviceMemory
"""One writable run of unsigned bytes in host memory (other processes may read the shared kind) or a device's memory."""


def host_bytes(memory: Memory) -> memoryview | None:
    """Returns the bytes themselves, not a copy, or None if the memory is a device's."""
    match memory:
        case SharedMemory():
            return memory.bytes
        case DeviceMemory():
            return None
        case _:
            return memory


class KvRegion:
    """``num_blocks`` blocks of ``block_bytes`` bytes each, back to back in writable memory.

    Raises ValueError if ``memory`` is not writable contiguous bytes, or not a whole number of blocks.
    """

    def __init__(self, memory: Memory, block_bytes: int) -> None:
        own = host_bytes(memory)
        if own is not None and (own.readonly or not own.c_contiguous or own.format != "B" or own.ndim != 1):
            raise ValueError("a KV region is one writable, contiguous run of unsigned bytes")
        if block_bytes < 1 or memory.nbytes == 0 or memory.nbytes % block_bytes:
            raise ValueError(f"{memory.nbytes} bytes are not a whole number of blocks of {block_bytes}")
        self.memory = memory
        self._bytes = own
        self.block_bytes = block_bytes
        self.num_blocks = memory.nbytes // block_bytes

    @property
    def unshared_memory(self) -> Memory:
        """The same memory without the means to let other processes map it."""
        return self.memory if self._bytes is None else self._bytes

    @property
    def readable(self) -> bool:
        """Whether this process can read blocks, and so can check them."""
        return self._bytes is not None

    def bytes_at(self, place: int, length: int) -> memoryview:
        """Returns the bytes themselves, not a copy. Raises ValueError if the memory is a device's."""
        if self._bytes is None:
            raise ValueError("the memory of a device cannot be read")
        return self._bytes[place : place + length]

    def block(self, block_id: int) -> memoryview:
        """Returns the memory of one block, not a copy. Raises ValueError if there is no such block."""
        self.check(block_id)
        return self.bytes_at(block_id * self.block_bytes, self.block_bytes)

    def place(self, block_id: int, first: int) -> int:
        """Returns where byte ``first`` of a block is, counted from the start of ``memory``. Checks nothing."""
        return block_id * self.block_bytes + first

    def check(self, *block_ids: int) -> None:
        """Raises ValueError unless every block exists."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"no block {block_id} in a region of {self.num_blocks}")
