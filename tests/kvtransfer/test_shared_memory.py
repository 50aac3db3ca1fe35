"""Tests which of another process's memory a process may map, and what it refuses."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from pdserve.wire.transfer import CELLS, MemoryOffer
from pdserve_kvtransfer.region import HEAD_BYTES, SharedMemory, host_bytes, open_offered

SIZE = 5_000


def offer_of(memory: SharedMemory) -> MemoryOffer:
    offer = memory.offer()
    assert offer is not None
    return offer


def test_another_process_reads_what_is_written() -> None:
    memory = SharedMemory(SIZE)
    assert memory.bytes == bytes(SIZE)
    memory.bytes[:5] = b"token"
    memory.bytes[-1:] = b"!"
    read = (
        "import mmap, sys, msgspec\n"
        "from pdserve.wire.transfer import MemoryOffer\n"
        "from pdserve_kvtransfer.region import HEAD_BYTES, open_offered\n"
        "offer = msgspec.json.decode(sys.argv[1], type=MemoryOffer)\n"
        "seen = mmap.mmap(open_offered(offer), HEAD_BYTES + offer.nbytes, prot=mmap.PROT_READ)\n"
        "print(seen[HEAD_BYTES:HEAD_BYTES + 5].decode(), chr(seen[-1]))"
    )
    told = msgspec.json.encode(offer_of(memory)).decode()
    done = subprocess.run([sys.executable, "-c", read, told], capture_output=True, text=True, check=True)
    assert done.stdout == "token !\n"


def test_nobody_writes_through_an_offer_and_nobody_shortens_the_memory() -> None:
    memory = SharedMemory(SIZE)
    offer = offer_of(memory)
    fd = open_offered(offer)
    assert fd is not None
    with open(fd, "rb"):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, HEAD_BYTES + SIZE)
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)
    for size in (HEAD_BYTES, HEAD_BYTES + 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(offer.fd, size)
    with open(f"/proc/self/fd/{offer.fd}", "r+b") as other, pytest.raises(PermissionError):
        mmap.mmap(other.fileno(), HEAD_BYTES + SIZE)
    memory.bytes[:1] = b"!"


def test_an_offer_for_each_link_and_none_that_is_given_twice() -> None:
    memory = SharedMemory(SIZE)
    offers = [offer_of(memory) for _ in range(CELLS)]
    assert {offer.cell for offer in offers} == set(range(CELLS))
    assert len({offer.nonce for offer in offers}) == CELLS
    assert memory.offer() is None
    memory.take_back(offers[7])
    again = offer_of(memory)
    assert again.cell == 7
    assert again.nonce != offers[7].nonce


def test_it_is_freed_with_its_last_user() -> None:
    memory = SharedMemory(SIZE)
    offer, used = offer_of(memory), memory.bytes
    del memory
    with pytest.raises(OSError):
        os.fstat(offer.fd)
    assert open_offered(offer) is None
    used[0] = 1


def opened(offer: MemoryOffer) -> list[str]:
    """Returns this process's file descriptors of the memory. Other tests' threads may open and close others."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if offer.name in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(fd)
    return found


def changed(**fields: object) -> Callable[[MemoryOffer], MemoryOffer]:
    return lambda offer: msgspec.structs.replace(offer, **fields)


@pytest.mark.parametrize(
    "change",
    [
        changed(pid=2**22 + 1),
        changed(fd=2**20),
        changed(name="0" * 32),
        changed(nbytes=SIZE - 1),
        changed(nbytes=SIZE + 1),
    ],
    ids=["no such process", "no such file", "another memory", "shorter", "longer"],
)
def test_what_is_not_there_as_it_is_offered_is_not_opened(change: Callable[[MemoryOffer], MemoryOffer]) -> None:
    memory = SharedMemory(SIZE)
    offer = offer_of(memory)
    before = opened(offer)
    assert before
    assert open_offered(change(offer)) is None
    assert opened(offer) == before


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SEAL, fcntl.F_SEAL_GROW])
def test_memory_that_can_be_shortened_is_not_opened(seals: int) -> None:
    offer = offer_of(SharedMemory(SIZE))
    fd = os.memfd_create(f"pdserve-kv-{offer.name}", os.MFD_ALLOW_SEALING)
    with closing(os.fdopen(fd, "wb")):
        os.ftruncate(fd, HEAD_BYTES + SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        assert open_offered(msgspec.structs.replace(offer, fd=fd)) is None


def test_memory_of_huge_pages_is_not_opened() -> None:
    """Pages of such memory may be missing when they are read, which would end the reader with SIGBUS."""
    nbytes = 2**21 - HEAD_BYTES
    for huge in (0, os.MFD_HUGETLB):
        name = secrets.token_hex(16)
        try:
            fd = os.memfd_create(f"pdserve-kv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | huge)
        except OSError as exc:
            pytest.skip(f"no huge pages here: {exc}")
        try:
            os.ftruncate(fd, HEAD_BYTES + nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            opened = open_offered(MemoryOffer(os.getpid(), fd, name, nbytes, 0, 1))
            assert (opened is None) is bool(huge)
            if opened is not None:
                os.close(opened)
        finally:
            os.close(fd)


def test_no_other_kind_of_file_is_opened_or_waited_for(tmp_path: Path) -> None:
    offer = offer_of(SharedMemory(SIZE))
    named = tmp_path / f"memfd:pdserve-kv-{offer.name}"
    named.write_bytes(bytes(HEAD_BYTES + SIZE))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, flags in ((named, os.O_RDONLY), (pipe, os.O_RDWR)):
        fd = os.open(path, flags)
        assert open_offered(msgspec.structs.replace(offer, fd=fd)) is None
        os.close(fd)


def test_memory_that_the_machine_does_not_have() -> None:
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(OSError, match="more than the memory of this machine"):
        SharedMemory(there + 1)
    offer = msgspec.structs.replace(offer_of(SharedMemory(SIZE)), nbytes=there + 1)
    with closing(os.fdopen(os.memfd_create(f"pdserve-kv-{offer.name}", os.MFD_ALLOW_SEALING), "wb")) as file:
        os.ftruncate(file.fileno(), HEAD_BYTES + offer.nbytes)
        fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        assert open_offered(msgspec.structs.replace(offer, fd=file.fileno())) is None


def test_its_bytes_are_host_memory() -> None:
    memory = SharedMemory(SIZE)
    assert host_bytes(memory) is memory.bytes
