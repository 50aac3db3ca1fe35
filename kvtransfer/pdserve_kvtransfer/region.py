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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pdserve.machine.file_system import file_system
from pdserve.wire.cache_groups import GroupBlocks
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


MAX_GROUPS = 256
"""The most groups that a cache may have: more than any model has."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The blocks of one group, which begin ``stride`` bytes apart."""

    first: int
    count: int
    start: int
    block_bytes: int
    stride: int


class KvRegion:
    """The blocks of one rank's cache in writable memory: those of one group, or those of all its groups.

    A block id is the engine's, so that it also says of which group the block is. Blocks without bytes never move.
    """

    def __init__(self, memory: Memory, blocks: int | Sequence[GroupBlocks]) -> None:
        """``blocks`` says where the groups' blocks are. For a single group, whose blocks lie back to back from the
        beginning to the end of the memory, it may be the bytes of a block.

        Raises ValueError if ``memory`` is not writable contiguous bytes, or does not hold these blocks.
        """
        if isinstance(blocks, int):
            if blocks < 1 or memory.nbytes == 0 or memory.nbytes % blocks:
                raise ValueError(f"{memory.nbytes} bytes are not a whole number of blocks of {blocks}")
            self._hold(memory, [_Run(0, memory.nbytes // blocks, 0, blocks, blocks)])
        else:
            self._hold(
                memory, [_Run(group.first, group.count, group.start, *[group.block_bytes] * 2) for group in blocks]
            )

    @classmethod
    def of_staging(cls, memory: Memory, count: int, block_bytes: Sequence[int]) -> KvRegion:
        """Returns ``count`` staging blocks, each of which takes a block of any group: of ``block_bytes[group]`` bytes.

        Staging block i has an id for each group, ``group * count + i``. Raises ValueError as the constructor does.
        """
        region, stride = cls.__new__(cls), max(block_bytes)
        runs = [_Run(group * count, count, 0, size, stride) for group, size in enumerate(block_bytes)]
        region._hold(memory, runs)
        return region

    def _hold(self, memory: Memory, runs: Sequence[_Run]) -> None:
        own = host_bytes(memory)
        if own is not None and (own.readonly or not own.c_contiguous or own.format != "B" or own.ndim != 1):
            raise ValueError("a KV region is one writable, contiguous run of unsigned bytes")
        end = 0
        for run in runs:
            if run.first != end or min(run.count, run.start, run.block_bytes) < 0:
                raise ValueError(f"a group has {run.count} blocks from {run.first} on, and {end} is the next id")
            end += run.count
            if run.start + run.count * run.stride > memory.nbytes:
                raise ValueError(f"the blocks from {run.first} on end outside of {memory.nbytes} bytes")
        if not any(run.block_bytes for run in runs) or len(runs) > MAX_GROUPS:
            raise ValueError(f"{len(runs)} groups of blocks: 1 to {MAX_GROUPS}, of which one has bytes")
        self.memory = memory
        self._bytes = own
        self._runs = tuple(runs)
        self.block_bytes = max(run.block_bytes for run in runs)
        """The bytes of the largest block."""
        self.num_blocks = end
        self._group_of = b"".join(bytes((number,)) * run.count for number, run in enumerate(runs))

    @property
    def num_groups(self) -> int:
        return len(self._runs)

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
        return self.bytes_at(self.place(block_id, 0), self.group_bytes(self.group_of(block_id)))

    def group_of(self, block_id: int) -> int:
        """Returns the number of a block's group. The block must exist."""
        return self._group_of[block_id]

    def group_bytes(self, group: int) -> int:
        """Returns the bytes of a block of this group."""
        return self._runs[group].block_bytes

    def place(self, block_id: int, first: int) -> int:
        """Returns where byte ``first`` of a block is, counted from the start of ``memory``. Checks nothing."""
        run = self._runs[self._group_of[block_id]]
        return run.start + (block_id - run.first) * run.stride + first

    def line(self, group: int) -> tuple[int, int]:
        """Returns two numbers ``(base, stride)``: block i of this group begins at ``base + i * stride``."""
        run = self._runs[group]
        return run.start - run.first * run.stride, run.stride

    def check(self, *block_ids: int) -> None:
        """Raises ValueError unless every block exists."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"no block {block_id} in a region of {self.num_blocks}")
