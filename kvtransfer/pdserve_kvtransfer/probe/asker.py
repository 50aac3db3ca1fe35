"""The asking end of a probe, and the tags, sizes and bounds of messages on the probe's link.

Both ends have scratch memory alone.
"""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Callable

from pdserve.errors import PeerLost
from pdserve_kvtransfer.pieces import label_of, tag_of
from pdserve_kvtransfer.transport import BusyPoll, Link

PING_TAG = 1
"""The tag of a ping: a few bytes that the host sends back."""
START_TAG = 2
"""The tag of the asker's message that asks for the load."""
LOAD_TAG = 3
"""The tag of the messages that were asked for, which have consecutive indexes."""

PING_BYTES = 8
MAX_ASKER_BYTES = 64
"""The longest message that an asker may send. A longer one ends the probe."""

PROBE_LIMIT_S = 10.0
"""The longest time that a probe may take."""
PAUSE_S = 1.0
"""The time between two probes, even of two askers."""
WINDOW = 32
"""How many messages are on the way at once."""

_PINGS = 200
_WARM_UP_MESSAGES = 8
_MAX_WAIT_MS = 20
_PARTS = 4
_MIN_PART = 3 * WINDOW
"""The messages in a part: many times the number that may have arrived before its clock starts."""


class ProbeAsker:
    """The asker's end of one connected link. Everything that it receives lands in scratch memory."""

    def __init__(self, link: Link, message_bytes: int, deadline: float) -> None:
        self._link = link
        self._deadline = deadline
        self._size = message_bytes
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)

    def ping(self) -> float:
        """Returns half the median round trip in seconds. Raises PeerLost if no ping comes back."""
        times = []
        for index in range(_PINGS):
            begun = time.perf_counter()
            self._link.send([0], PING_BYTES, [label_of(PING_TAG, index)])
            if not self._until(self._answered):
                break
            times.append(time.perf_counter() - begun)
        if not times:
            raise PeerLost("nothing came back over UCX")
        return statistics.median(times) / 2

    def _answered(self) -> bool:
        take(self._link, PING_TAG, PING_BYTES)
        return bool(self._link.landed())

    def load(self, messages: int) -> tuple[int, float]:
        """Returns how many messages were received, and the bytes a second once the load runs."""
        load = _Throughput(self._link, self._size, messages)
        self._link.send([0], PING_BYTES, [label_of(START_TAG, 0)])
        self._until(load.step)
        return load.landed, load.bytes_per_s

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Lets data move as a transfer thread does until ``condition``. Returns False if time ran out."""
        busy_poll = BusyPoll()
        while not condition():
            now = time.monotonic()
            if now >= self._deadline:
                return False
            moved = self._link.progress()
            self._link.sent()  # nobody asks, but what is over and not read keeps the link from being armed
            if self._link.broken():
                raise PeerLost("the connection of the probe broke")
            if not busy_poll.again(moved, True, now) and self._link.arm():
                self._poll.poll(_MAX_WAIT_MS)
        return True


def probe_memory(message_bytes: int) -> memoryview:
    """Returns the memory for the asker's link, which sends from its start and receives there."""
    return memoryview(bytearray(max(message_bytes, PING_BYTES)))


def take(link: Link, tag: int, length: int) -> None:
    """Receives the messages that have arrived. Raises PeerLost if one has another tag or length."""
    arrivals = link.arrivals()
    if any(tag_of(arrival.label) != tag or arrival.length != length for arrival in arrivals):
        raise PeerLost("the probe's link carries something else")
    if arrivals:
        link.receive([0] * len(arrivals))


class _Throughput:
    """The messages of a load, which are received as they come, all at the same place."""

    def __init__(self, link: Link, message_bytes: int, messages: int) -> None:
        self._link = link
        self._size = message_bytes
        self._messages = messages
        # Connections start slowly, so the clock starts at the end of this message.
        self._warm = max(1, min(_WARM_UP_MESSAGES, messages // 2))
        self._began = time.perf_counter()
        self._times: list[float] = []

    @property
    def landed(self) -> int:
        return len(self._times)

    @property
    def bytes_per_s(self) -> float:
        """The rate of the best part of the load, since others use the machine, too; 0 if too little landed to tell."""
        timed = self._times[self._warm - 1 :]
        part = max((len(timed) - 1) // _PARTS, _MIN_PART)
        starts = range(0, len(timed) - part, part)
        parts = [timed[start : start + part + 1] for start in starts] or [timed]
        best = max(self._rate(times) for times in parts)
        if best or self.landed < self._messages:
            return best
        # All messages landed in one poll.
        return self.landed * self._size / (self._times[-1] - self._began)

    def _rate(self, times: list[float]) -> float:
        """Returns the rate after the first time. Messages that landed at that time took longer than is known."""
        span = times[-1] - times[0] if times else 0.0
        return sum(later > times[0] for later in times) * self._size / span if span > 0 else 0.0

    def step(self) -> bool:
        """Receives the messages that have arrived. Returns whether all have landed. Raises PeerLost."""
        now = time.perf_counter()
        self._times += [now] * len(self._link.landed())
        take(self._link, LOAD_TAG, self._size)
        return self.landed == self._messages
