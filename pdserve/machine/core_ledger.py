"""The core ledger: a small file that says, for each core of a machine, which engine has it now.

Engines map it into their memory, and change a core's word there (csrc/core_ledger.h of the CPU kernels). The file
holds nothing secret, and nothing that is worth keeping. An engine has a number while it holds the lock on the byte of
the file with that number. The kernel frees the lock when the process ends, in whatever way and in whatever container,
so a number whose lock is free is no living engine's.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.machine.file_system import check_own

MAGIC = b"pdserve cores 1\n"
HEADER_BYTES = 64
WORD_BYTES = 64
MAX_ENGINES = 1024
_LOCK_TIMEOUT_S = 5.0
_LOCK_PAUSE_S = 0.01
_MAX_BYTES = 2**20


class CoreState(enum.IntEnum):
    """Who may use a core, as in csrc/core_ledger.h."""

    NOBODYS = 0
    FREE = 1
    OWNED = 2
    LENT = 3
    WANTED = 4
    SHARED = 5


@dataclass(frozen=True, slots=True)
class CoreWord:
    """A core's word. Engines have numbers from 1 on; 0 is none. The borrower of a SHARED core is its second owner."""

    state: CoreState
    owner: int
    borrower: int


class CoreLedger:
    """The open file. The caller has to close it, which also frees this engine's number."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and makes it if it is not there, for this user alone. Raises ConfigError.

        Links are not followed: another user's, in a folder for all, would make a ledger of a file of this user's.
        """
        self._path = path
        self.engine = 0
        """This engine's number, or 0 if it has none."""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _no_links(path), 0o600)
        except OSError as exc:
            raise self._unusable("it is a link" if exc.errno == errno.ELOOP else exc) from exc
        try:
            with self._locked():
                self._map = self._mapped()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> CoreLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def words(self) -> memoryview:
        """The cores' words, ``WORD_BYTES`` for each. Every view of them has to be released before ``close``."""
        return memoryview(self._map)[HEADER_BYTES:]

    def read(self) -> list[CoreWord]:
        """Returns the word of each core of the machine."""
        with self.words as words:
            return [_read_word(words, at) for at in range(0, len(words), WORD_BYTES)]

    def join(self, forget: Callable[[int], None]) -> int:
        """Takes a number for this engine and returns it. ``forget`` is called for each number that is no living
        engine's but is in the ledger, the new one among them. If no engine lives, the ledger begins anew.

        Raises ConfigError if there are too many engines.
        """
        with self._locked():
            if self._is_free(1, MAX_ENGINES - 1):
                with self.words as words:
                    words[:] = bytes(len(words))
            for engine in self._dead():
                forget(engine)
            for engine in range(1, MAX_ENGINES):
                if self._try_lock(engine):
                    self.engine = engine
                    return engine
        raise self._unusable(f"it has {MAX_ENGINES - 1} engines already")

    def engines(self) -> int:
        """Returns how many engines live."""
        return sum(number == self.engine or not self._is_free(number) for number in range(1, MAX_ENGINES))

    def forget_dead(self, forget: Callable[[int], None]) -> None:
        """Calls ``forget`` for each engine in the ledger that has died, unless another engine does so just now."""
        for engine in self._dead():
            # Nobody else takes the number meanwhile.
            if self._try_lock(engine):
                try:
                    forget(engine)
                finally:
                    self._lock(engine, fcntl.F_UNLCK)

    def close(self) -> None:
        # An exception's traceback may have a view of the words still; the memory then goes with that.
        with suppress(BufferError):
            self._map.close()
        os.close(self._fd)

    def _dead(self) -> list[int]:
        seen = {number for word in self.read() for number in (word.owner, word.borrower)}
        return sorted(number for number in seen - {0, self.engine} if self._is_free(number))

    def _mapped(self) -> mmap.mmap:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise self._unusable("it is no regular file")
        try:
            check_own(found)
            if found.st_size == 0 or self._is_unfinished(found.st_size):
                self._make()
                found = os.fstat(self._fd)
            cores, rest = divmod(found.st_size - HEADER_BYTES, WORD_BYTES)
            if rest or not 0 < cores * WORD_BYTES < _MAX_BYTES or os.pread(self._fd, len(MAGIC), 0) != MAGIC:
                raise self._unusable("it is no core ledger")
            return mmap.mmap(self._fd, found.st_size)
        except OSError as exc:
            raise self._unusable(exc) from exc

    def _is_unfinished(self, size: int) -> bool:
        """Returns whether an engine died while it made the file. It writes ``MAGIC`` last."""
        return size < _MAX_BYTES and not any(os.pread(self._fd, size, 0)) and self._is_free(1, MAX_ENGINES - 1)

    def _make(self) -> None:
        # A number of a core may be larger than the count of those that are on.
        cores = max(os.sysconf("SC_NPROCESSORS_CONF"), *(core + 1 for core in os.sched_getaffinity(0)))
        os.ftruncate(self._fd, 0)
        try:
            # The memory is reserved now: an engine that writes where none is left would be killed.
            os.posix_fallocate(self._fd, 0, HEADER_BYTES + WORD_BYTES * cores)
            os.pwrite(self._fd, MAGIC, 0)
        except OSError:
            os.ftruncate(self._fd, 0)
            raise

    # ------------------------------------------------------------ locks, which belong to the open file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one engine at a time opens or joins the ledger."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not self._try_lock(0):
            if time.monotonic() > deadline:
                raise self._unusable("another engine has it locked for long")
            time.sleep(_LOCK_PAUSE_S)
        try:
            yield
        finally:
            self._lock(0, fcntl.F_UNLCK)

    def _try_lock(self, byte: int) -> bool:
        try:
            self._lock(byte, fcntl.F_WRLCK)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise self._unusable(exc) from exc
        return True

    def _lock(self, byte: int, kind: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(kind, byte))

    def _is_free(self, byte: int, count: int = 1) -> bool:
        """Returns whether nobody else has a lock on any of ``count`` bytes."""
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte, count))
        kind: int = _FLOCK.unpack(found)[0]
        return kind == fcntl.F_UNLCK

    def _unusable(self, why: str | OSError) -> ConfigError:
        said = why.strerror if isinstance(why, OSError) else why
        return ConfigError(f"--core-ledger {self._path}: {said}")


@contextmanager
def private_ledger() -> Iterator[Path]:
    """Yields where processes of this user find a ledger that ends with the last of them, even if all are killed."""
    memory = os.memfd_create("pdserve-cores")
    try:
        os.fchmod(memory, 0o600)
        yield Path(f"/proc/{os.getpid()}/fd/{memory}")
    finally:
        os.close(memory)


def _no_links(path: Path) -> int:
    """Returns the flag of ``open`` for that. What ``private_ledger`` yields is a link by its form, but the kernel's."""
    return 0 if path.match("/proc/*/fd/*") else os.O_NOFOLLOW


_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length and pid."""


def _flock(kind: int, byte: int, count: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0)


def _read_word(words: memoryview, at: int) -> CoreWord:
    state, owner, borrower = struct.unpack_from("<BxHH", words, at)
    return CoreWord(CoreState(state) if state in set(CoreState) else CoreState.NOBODYS, owner, borrower)
