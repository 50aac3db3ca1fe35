"""The cores of the compiled kernels' loops: an engine's own, which it lends while it sleeps, and those of others.

Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from pdserve_kernels.cpu.library import Library

WORD_BYTES = 64
"""Each core's word has a line of the cache for itself, as in csrc/core_ledger.h."""


class LentCores:
    """The cores of one engine, and those that it borrows: csrc/lent_cores.cpp in Python.

    A process has at most one until that is closed. The thread that computes calls all of it.
    """

    def __init__(self, library: Library, words: memoryview, engine: int, own: Sequence[int]) -> None:
        """``words`` has ``WORD_BYTES`` for each core of the machine, and is shared with the other engines. It has to
        stay until ``close``. No other living engine may have the number ``engine``, which is from 1 to 65535.

        Raises RuntimeError if this process has lent its cores already.
        """
        self._library = library
        self._words = (ctypes.c_char * len(words)).from_buffer(words)
        cores = (ctypes.c_int * len(own))(*own)
        at, count = ctypes.addressof(self._words), len(words) // WORD_BYTES
        if not library.cores_open(at, count, engine, cores, len(own)):
            raise RuntimeError("this process lends its cores already")
        self._open = True

    def begin_step(self) -> None:
        """Has the own cores again, and borrows those that are free."""
        self._library.cores_begin_step()

    def sleep(self) -> None:
        """Gives back what is borrowed and lends the own cores, because this engine has nothing to compute."""
        self._library.cores_sleep()

    @property
    def borrowed(self) -> int:
        """The cores of others that compute for this engine."""
        return int(self._library.cores_borrowed())

    @property
    def borrowed_s(self) -> float:
        """The sum of the times for which cores were borrowed, in seconds."""
        return float(self._library.cores_borrowed_seconds())

    @property
    def pieces(self) -> int:
        """The pieces of loops that borrowed cores have computed."""
        return int(self._library.cores_pieces())

    def close(self) -> None:
        """Ends the threads on borrowed cores. The own cores are nobody's from now on. May be called again."""
        if self._open:
            self._open = False
            self._library.cores_close()
            # The memory may go only when nothing points to it any more.
            del self._words


def forget_engine(library: Library, words: memoryview, engine: int) -> None:
    """Gives back what an engine had that has died. The caller keeps others from taking that number meanwhile."""
    memory = (ctypes.c_char * len(words)).from_buffer(words)
    library.cores_forget(ctypes.addressof(memory), len(words) // WORD_BYTES, engine)
