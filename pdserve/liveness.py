"""How a loop shows that it lives, and how its watcher tells a loop that hangs from one that is slow or waits its turn.

A process that has ended is noticed by its pidfd. One that was stopped, or whose loop waits for ever for a GPU, a disk
or a lock, has to be noticed by its silence, and by the silence of that loop: another thread or process of the same
node says nothing about it.

Each loop has a ``LifeSign`` in a ``LifeBoard``, memory that it shares with its watcher. At least every
``SHOWN_EVERY_S`` it writes the present time there, idle or not; before long work it writes when that will be over. A
sign costs a store of eight bytes.

Silence alone would end healthy nodes on a slow machine. So the watcher also looks whether the kernel lets the loop's
thread run, or has it wait for a core. A thread that does neither is stopped or blocked. One that does may compute for
longer than it thought, and has ``BUSY_TIMES`` as long. On a GPU that is no evidence, because a host that waits for
one often spins: there only the announced time counts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

SHOWN_EVERY_S = 1.0
"""A loop that waits for news waits no longer than this before it shows life again."""
SHOWN_EVERY_MS = int(SHOWN_EVERY_S * 1000)
BUSY_TIMES = 12.0
"""A thread that runs, or waits for a core, may be silent for so many times as long as one that does not."""

_LINE_WORDS = 8
"""Each loop has a cache line of its own: threads on different cores do not take each other's."""
_SIGN, _PROCESS, _THREAD, _COMPUTES = range(4)
_TICKS = os.sysconf("SC_CLK_TCK")


class LifeBoard:
    """Memory for the signs of ``count`` loops. It has no name, so the kernel frees it after the last process."""

    def __init__(self, descriptor: int) -> None:
        """Maps the memory that ``create`` has made, in this process or in the one that passed ``descriptor`` on."""
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._words = memoryview(self._map).cast("d")

    @classmethod
    def create(cls, count: int) -> LifeBoard:
        descriptor = os.memfd_create("pdserve-life", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, count * _LINE_WORDS * 8)
        return cls(descriptor)

    def sign(self, number: int) -> LifeSign:
        """Returns the sign of the loop ``number``, for the thread that runs it."""
        return LifeSign(self._words, number * _LINE_WORDS)

    def shown(self, number: int) -> Shown | None:
        """Returns what the loop ``number`` shows; None if there is no such loop, or it has ended in order."""
        at = number * _LINE_WORDS
        sign, process, thread, computes = self._words[at : at + 4].tolist()
        return Shown(sign, int(process), int(thread), bool(computes)) if process else None

    def close(self) -> None:
        """Closes the board. No sign of it may be used any more."""
        os.close(self.descriptor)
        self._words.release()
        self._map.close()


class LifeSign:
    """Where one loop shows life."""

    def __init__(self, words: memoryview[float], at: int) -> None:
        self._words = words
        self._at = at

    @contextlib.contextmanager
    def shown_by_this_thread(self, *, computes: bool = True) -> Iterator[None]:
        """Has the calling thread watched for as long as the block.

        ``computes`` says whether CPU time shows that its work goes on; it does not where the thread waits for a GPU.
        """
        words, at = self._words, self._at
        words[at + _THREAD], words[at + _COMPUTES] = threading.get_native_id(), computes
        self.show()
        words[at + _PROCESS] = os.getpid()
        try:
            yield
        finally:
            words[at + _PROCESS] = 0

    def show(self, busy_s: float = 0.0) -> None:
        """Shows life now. The loop will be silent for ``busy_s`` because it has work for so long."""
        self._words[self._at + _SIGN] = time.monotonic() + busy_s


def unseen_sign() -> LifeSign:
    """Returns the sign of a loop that nobody watches."""
    return LifeSign(memoryview(bytearray(_LINE_WORDS * 8)).cast("d"), 0)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a loop shows. ``sign`` is when it showed life last, or until when it has work."""

    sign: float
    process: int
    thread: int
    computes: bool


class Motion(NamedTuple):
    """Whether a thread does anything, as the kernel sees it."""

    ran: float
    """The time for which it has run on a core."""
    wants_core: bool
    """Whether it runs now or waits for a core."""


def motion_of(process: int, thread: int) -> Motion | None:
    """Returns the motion of a thread; None if there is no such thread, or the system does not tell."""
    folder = f"/proc/{process}/task/{thread}"
    try:
        state, *fields = _read(f"{folder}/stat").rpartition(")")[2].split()
        ran = (int(fields[10]) + int(fields[11])) / _TICKS
        with contextlib.suppress(OSError):  # more exact, where the kernel was built with it
            ran = int(_read(f"{folder}/schedstat").split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
    return Motion(ran, state == "R") if ran else None


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


class Silence:
    """Counts how long one loop has been silent, by its watcher's looks. Times are in seconds.

    Looks count, not times: a watcher that was stopped, or is late itself, has not looked meanwhile.
    """

    def __init__(self, silence_s: float, busy_s: float) -> None:
        """``silence_s`` is how long it may be silent without running, and ``busy_s`` how long if it runs."""
        self._silence_s, self._busy_s = silence_s, busy_s
        self._sign = -1.0
        self._ran = -1.0
        self._still_s = self._silent_s = 0.0

    def look(self, sign: float, now: float, motion: Motion | None, passed_s: float) -> bool:
        """Takes what a loop shows ``now``, and its thread's motion if that says anything.

        Returns whether the loop hangs. ``passed_s`` is the time since the last look.
        """
        moved = motion is not None and (motion.wants_core or motion.ran != self._ran)
        self._ran = self._ran if motion is None else motion.ran
        if sign != self._sign:
            self._sign, self._still_s, self._silent_s = sign, 0.0, 0.0
            return False
        due = now > sign
        self._silent_s += passed_s if due else 0.0
        if moved:
            self._still_s = 0.0
        elif due or motion is not None:
            # A thread that computes uses CPU time, however long it has said that it will be silent.
            self._still_s += passed_s
        return self._still_s >= self._silence_s or self._silent_s >= self._busy_s


class LifeWatch:
    """Watches loops of a board by their numbers, each with a name for people."""

    def __init__(
        self,
        board: LifeBoard,
        names: dict[int, str],
        silence_s: float,
        motion: Callable[[int, int], Motion | None] = motion_of,
    ) -> None:
        self._board = board
        self._names = names
        self._motion = motion
        self._silences = {number: Silence(silence_s, BUSY_TIMES * silence_s) for number in names}
        self.every_s = min(SHOWN_EVERY_S, silence_s / 4)
        """The caller looks at this interval."""
        self._looked = time.monotonic()

    def hanging(self) -> str | None:
        """Looks at every loop. Returns the name of one that hangs, if there is one."""
        now = time.monotonic()
        passed_s = min(now - self._looked, 2 * self.every_s)
        self._looked = now
        hanging = [name for number, name in self._names.items() if self._hangs(number, now, passed_s)]
        return hanging[0] if hanging else None

    def _hangs(self, number: int, now: float, passed_s: float) -> bool:
        shown = self._board.shown(number)
        if shown is None:
            return False
        motion = self._motion(shown.process, shown.thread) if shown.computes else None
        return self._silences[number].look(shown.sign, now, motion, passed_s)


def loop_names(ranks: int) -> dict[int, str]:
    """Returns the names of all loops of an engine of so many ranks, by their numbers on its board."""
    names: dict[int, str] = {}
    for rank in range(ranks):
        whose = f"rank {rank}'s" if rank else "the engine's"
        names[step_loop(rank)] = f"tensor-parallel rank {rank}" if rank else "the engine's step loop"
        names[transfer_loop(rank)] = f"{whose} KV transfer"
        names[copy_loop(rank)] = f"{whose} copying of KV blocks"
    return names


def step_loop(rank: int) -> int:
    """Returns the number of the loop that computes this rank's steps."""
    return 3 * rank


def transfer_loop(rank: int) -> int:
    """Returns the number of the loop of this rank's transfer thread."""
    return 3 * rank + 1


def copy_loop(rank: int) -> int:
    """Returns the number of the loop that copies this rank's KV blocks between its GPU and its transfer thread."""
    return 3 * rank + 2
