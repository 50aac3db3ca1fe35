"""The clients of a soak: each asks, in one manner after the other, and says how its request ended.

A client does what the pages tell it to do. When its proxy is lost, it asks the other one: anew, or with a key for the
rest of its answer. When it is told to come again later (503 with ``Retry-After``), after a fault, it does. Nothing
else may happen: any other error, an answer that differs from its reference, and one that never comes count against the
cluster.
"""

from __future__ import annotations

import asyncio
import enum
import io
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp

from lab.soak.answers import (
    Answer,
    BrokenAnswer,
    ErrorEvent,
    Events,
    add_event,
    difference,
    prefix_difference,
    read_body,
)
from lab.soak.catalogue import Ask, Nonsense

PATIENCE_S = 180.0
"""A client that has no answer by then counts its request as lost."""
SILENCE_S = 45.0
"""A client that hears nothing for so long gives its connection up."""
_LONGEST_WAIT_S = 5.0
_PAUSE_S = 0.1
_OF_LOST_PROXY = frozenset({"", "shutting_down", "upstream_lost"})
"""How an answer ends at a proxy that is hit: with its connection, because the proxy is drained, or because it was
stopped for so long that it takes its nodes for lost."""


class Manner(enum.Enum):
    """How a client behaves."""

    PATIENT = "reads to the end"
    SLOW = "reads slowly"
    LEAVING = "leaves"
    KEYED = "has a key, and goes on after a loss"
    BREAKING = "has a key, breaks off and goes on"
    REPEATING = "asks again with its key"
    NONSENSE = "sends nonsense"
    HALF = "sends half a request"
    LOOKING = "looks at the cluster"


WEIGHTS: Mapping[Manner, int] = {
    Manner.PATIENT: 50,
    Manner.SLOW: 4,
    Manner.LEAVING: 12,
    Manner.KEYED: 10,
    Manner.BREAKING: 8,
    Manner.REPEATING: 4,
    Manner.NONSENSE: 8,
    Manner.HALF: 2,
    Manner.LOOKING: 2,
}


class Outcome(enum.Enum):
    """How a request ended. Each has exactly one."""

    RIGHT = "right"
    LEFT = "left"
    """Its client left. What it had was the beginning of the right answer."""
    REFUSED = "refused"
    """It was nonsense, and refused as such."""
    WRONG = "wrong"
    LOST = "lost"


_LOOKED_AT = {
    "/v1/models": 200,
    "/metrics": 200,
    "/instances": 200,
    "/status": 401,
    "/health": 200,
    "/server_info": 200,
}
"""What describes the cluster, and the status that a client gets. Admins alone see the requests of all clients."""


class Cause(enum.Enum):
    """Why a client had to ask again. The promise of the pages allows these, and no others."""

    PROXY_LOST = "its proxy was lost"
    COME_AGAIN = "it was told to come again (503 with Retry-After, after a fault)"
    TWO_NODES = "two of its nodes were lost"
    NOT_ASKED = "the node that keeps its answer could not be asked (502)"
    NOT_KEPT = "its answer was not kept any more (410)"


_KEEPING_ID = frozenset({Cause.PROXY_LOST, Cause.COME_AGAIN, Cause.NOT_ASKED})
"""Where a client that has the id of an event goes on behind that event."""


class Unpromised(Exception):
    """Something that no promise allows."""


class _AskAgain(Exception):
    def __init__(self, cause: Cause, wait_s: float = 0.0) -> None:
        super().__init__(cause.value)
        self.cause = cause
        self.wait_s = wait_s


class _Left(Exception):
    pass


@dataclass(frozen=True)
class Finding:
    """A request that ended wrong or lost."""

    at_s: float
    ask: str
    manner: Manner
    outcome: Outcome
    what: str
    label: str


@dataclass
class Tally:
    """What became of all requests."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    manners: Counter[Manner] = field(default_factory=Counter)
    causes: Counter[Cause] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    longest_s: float = 0.0
    tokens: int = 0

    @property
    def requests(self) -> int:
        return self.outcomes.total()


class Faults(Protocol):
    """What clients need to know of faults: whether one explains what they saw. Times are of ``time.monotonic``."""

    def hit(self, server: str, since: float) -> bool:
        """Returns whether a fault has hit this server since then."""

    def hits_on_nodes(self, since: float) -> int:
        """Returns how many faults have hit nodes since then."""

    def lost_nodes(self, since: float) -> int:
        """Returns how many nodes have been hit since then by a fault with which a node can lose requests."""


@dataclass(frozen=True)
class Door:
    """A proxy as clients know it."""

    name: str
    url: str


@dataclass
class Asked:
    """One request of one client, until its outcome."""

    ask: Ask
    body: bytes
    headers: dict[str, str]
    label: str
    began: float
    answer: Answer = field(default_factory=Answer)
    last_id: str = ""
    events: int = 0
    number: int = 0
    """The number of the last event in its own id: they come in order, and none twice."""

    def afresh(self) -> None:
        self.answer, self.last_id, self.events, self.number = Answer(), "", 0, 0


def connections() -> aiohttp.ClientSession:
    """Returns the connections of one client. The caller closes them."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE_S)
    # A small buffer, so that what a slow reader does not read stays at the proxy.
    return aiohttp.ClientSession(timeout=timeout, read_bufsize=4096)


class Client:
    """One client of one tenant, with connections of its own."""

    def __init__(
        self,
        number: int,
        seed: int,
        doors: Sequence[Door],
        key: str,
        asks: Sequence[Ask],
        nonsense: Sequence[Nonsense],
        references: Mapping[str, Answer],
        faults: Faults,
        tally: Tally,
        began: float,
    ) -> None:
        self._dice = random.Random(f"client {number} of {seed}")
        self._doors = doors
        self._key = key
        self._asks = asks
        self._nonsense = nonsense
        self._references = references
        self._faults = faults
        self._tally = tally
        self._began = began
        self._turn = number

    async def run(self, until: float) -> None:
        """Asks one request after the other, until this time of ``time.monotonic``."""
        manners, weights = list(WEIGHTS), list(WEIGHTS.values())
        async with connections() as session:
            while time.monotonic() < until:
                await self.ask_once(session, self._dice.choices(manners, weights)[0])

    async def ask_once(self, session: aiohttp.ClientSession, manner: Manner) -> None:
        """Asks one request, and notes its outcome."""
        began = time.monotonic()
        label = f"{manner.name.lower()}-{uuid.UUID(int=self._dice.getrandbits(128)).hex[:16]}"
        name, what = "", ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                if manner is Manner.NONSENSE:
                    bad = self._dice.choice(self._nonsense)
                    name = bad.name
                    outcome = await self._send_nonsense(session, bad)
                elif manner is Manner.HALF:
                    outcome = await self._send_half()
                elif manner is Manner.LOOKING:
                    outcome = await self._look(session)
                else:
                    ask = self._dice.choice(self._asks)
                    name = ask.name
                    outcome = await self._ask(session, ask, manner, label)
        except Unpromised as exc:
            outcome, what = Outcome.LOST, str(exc)
        except BrokenAnswer as exc:
            outcome, what = Outcome.WRONG, str(exc)
        except TimeoutError:
            outcome, what = Outcome.LOST, f"no answer after {PATIENCE_S:g} s"
        took = time.monotonic() - began
        self._tally.outcomes[outcome] += 1
        self._tally.manners[manner] += 1
        self._tally.kinds[name.rpartition("-")[0] if outcome in (Outcome.RIGHT, Outcome.LEFT) else name] += 1
        self._tally.longest_s = max(self._tally.longest_s, took)
        if what:
            found = Finding(round(began - self._began, 1), name, manner, outcome, what, label)
            self._tally.findings.append(found)
            print(found, flush=True)

    def _door(self) -> Door:
        self._turn += 1
        return self._doors[self._turn % len(self._doors)]

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask, manner: Manner, label: str) -> Outcome:
        asked = self._asked(ask, manner, label)
        wanted = self._references[ask.name]
        # Where a client that leaves or breaks off does so: after so many reads.
        breaks_at = self._dice.choice((0, 1, 2, 4, 8, 20)) if manner in (Manner.LEAVING, Manner.BREAKING) else -1
        again = 1 if manner is Manner.REPEATING else 0
        while True:
            door = self._door()
            try:
                await self._until_complete(session, asked, door, manner, breaks_at)
            except _Left:
                if what := prefix_difference(asked.answer, wanted):
                    raise BrokenAnswer(f"it left with {what}") from None
                if manner is Manner.LEAVING:
                    return Outcome.LEFT
                breaks_at = -1
                if not asked.last_id:
                    asked.afresh()
                continue
            except _AskAgain as exc:
                if what := prefix_difference(asked.answer, wanted):
                    raise BrokenAnswer(f"{exc}, and before that it had {what}") from None
                self._tally.causes[exc.cause] += 1
                if not asked.last_id or exc.cause not in _KEEPING_ID:
                    asked.afresh()
                if exc.cause in (Cause.TWO_NODES, Cause.NOT_KEPT):
                    asked = self._asked(ask, manner, f"{label}-{self._dice.getrandbits(32):x}", asked.began)
                await asyncio.sleep(exc.wait_s)
                continue
            if what := difference(asked.answer, wanted):
                raise BrokenAnswer(what)
            self._tally.tokens += wanted.usage[1] if wanted.usage else 0
            if not again:
                return Outcome.RIGHT
            again -= 1
            asked.afresh()

    def _asked(self, ask: Ask, manner: Manner, label: str, began: float = 0.0) -> Asked:
        more: dict[str, object] = {"user": label}
        if self._dice.random() < 0.6:
            # Without a salt of its own, most of the prompt would be in the caches.
            more["cache_salt"] = label
        body = json.dumps({**ask.body, **more}).encode()
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json", "x-request-id": label}
        if manner in (Manner.KEYED, Manner.BREAKING, Manner.REPEATING):
            headers["idempotency-key"] = label
        return Asked(ask, body, headers, label, began or time.monotonic())

    async def _until_complete(
        self, session: aiohttp.ClientSession, asked: Asked, door: Door, manner: Manner, breaks_at: int
    ) -> None:
        """Reads the answer, or the rest of it, from one proxy. Raises _AskAgain, _Left, Unpromised or BrokenAnswer."""
        since = time.monotonic()
        headers = dict(asked.headers)
        if asked.last_id:
            headers["last-event-id"] = asked.last_id
        try:
            async with session.post(door.url + asked.ask.path, data=asked.body, headers=headers) as response:
                if response.status != 200:
                    self._refusal(asked, response, await response.read())
                if breaks_at == 0:
                    raise _Left
                await self._read(asked, response, manner, breaks_at)
        except ErrorEvent as exc:
            self._explain(asked, door, since, f"{exc}", exc.code)
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            if isinstance(exc, TimeoutError) and not isinstance(exc, aiohttp.ServerTimeoutError):
                raise
            self._explain(asked, door, since, f"{exc!r}")
        if not asked.answer.whole:
            self._explain(asked, door, since, "the answer ended before its end")

    def _refusal(self, asked: Asked, response: aiohttp.ClientResponse, body: bytes) -> None:
        """Raises what an answer with another status than 200 means."""
        status, said = response.status, body[:300].decode(errors="replace")
        if self._may_come_again(response, asked.began):
            raise _AskAgain(Cause.COME_AGAIN, min(_LONGEST_WAIT_S, float(response.headers["retry-after"])))
        # A proxy that is lost leaves answers that nobody reads, of which a node keeps only so many for a client.
        if status == 410 and asked.last_id and self._disturbed(asked.began):
            raise _AskAgain(Cause.NOT_KEPT)
        if status == 502 and asked.last_id and self._faults.hits_on_nodes(asked.began):
            raise _AskAgain(Cause.NOT_ASKED, _PAUSE_S)
        if self._faults.lost_nodes(asked.began) >= 2 and (status == 502 or "suspected_request" in said):
            raise _AskAgain(Cause.TWO_NODES)
        raise Unpromised(f"status {status}: {said}")

    def _may_come_again(self, response: aiohttp.ClientResponse, since: float) -> bool:
        """Returns whether the client is told to ask again later, because a fault has left too few servers."""
        return response.status == 503 and "retry-after" in response.headers and self._disturbed(since)

    def _disturbed(self, since: float) -> bool:
        """Returns whether a fault has hit any server since then."""
        return self._faults.hits_on_nodes(since) > 0 or any(self._faults.hit(door.name, since) for door in self._doors)

    def _explain(self, asked: Asked, door: Door, since: float, what: str, code: str = "") -> None:
        """Raises _AskAgain for a broken answer that faults explain, and Unpromised for any other.

        ``code`` is of the error with which the proxy itself has ended the answer; a living proxy always gives one.
        """
        if self._faults.hit(door.name, since) and code in _OF_LOST_PROXY:
            raise _AskAgain(Cause.PROXY_LOST, _PAUSE_S)
        if code == "upstream_lost" and self._faults.lost_nodes(asked.began) >= 2:
            raise _AskAgain(Cause.TWO_NODES)
        raise Unpromised(f"{what}, after {time.monotonic() - since:.1f} s at {door.name}, {asked.events} events")

    async def _read(self, asked: Asked, response: aiohttp.ClientResponse, manner: Manner, breaks_at: int) -> None:
        if not asked.ask.streamed:
            if breaks_at > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02 * breaks_at):
                        asked.answer = read_body(asked.ask.path, await response.read())
                        return
                raise _Left
            asked.answer = read_body(asked.ask.path, await response.read())
            return
        events, reads = Events(), 0
        async for data in response.content.iter_any():
            for event in events.feed(data):
                self._take_id(asked, event.id)
                add_event(asked.answer, event)
                asked.events += 1
            reads += 1
            if reads == breaks_at and not asked.answer.whole:
                raise _Left
            if manner is Manner.SLOW and reads < 20:
                await asyncio.sleep(self._dice.uniform(0.05, 0.4))

    def _take_id(self, asked: Asked, event_id: str) -> None:
        """Notes the id of an event. Raises BrokenAnswer if it is not the next one."""
        if not event_id:
            return
        ending = event_id.rpartition(".")[2]
        if not ending.isdecimal():
            raise BrokenAnswer(f"an event has the id {event_id[:80]!r}")
        number = int(ending)
        if number != asked.number + 1:
            raise BrokenAnswer(f"event {number} came behind event {asked.number}")
        asked.number, asked.last_id = number, event_id

    async def _send_nonsense(self, session: aiohttp.ClientSession, bad: Nonsense) -> Outcome:
        headers = {"content-type": "application/json"}
        if bad.key:
            headers["authorization"] = f"Bearer {self._key}"
        while True:
            door, since = self._door(), time.monotonic()
            try:
                async with session.post(door.url + bad.path, data=io.BytesIO(bad.body), headers=headers) as response:
                    body = await response.read()
                    if response.status == bad.status and b'"error"' in body:
                        return Outcome.REFUSED
                    if self._may_come_again(response, since):
                        self._tally.causes[Cause.COME_AGAIN] += 1
                        await asyncio.sleep(min(_LONGEST_WAIT_S, float(response.headers["retry-after"])))
                        continue
                    raise Unpromised(f"status {response.status} in place of {bad.status}: {body[:200]!r}")
            except (aiohttp.ClientError, OSError) as exc:
                if bad.status == 413 and isinstance(exc, (ConnectionError, aiohttp.ClientOSError)):
                    # The proxy refuses such a body without reading it, and the client may not come to read why.
                    return Outcome.REFUSED
                if not self._faults.hit(door.name, since):
                    raise Unpromised(f"{exc!r} at {door.name}") from exc
                self._tally.causes[Cause.PROXY_LOST] += 1

    async def _send_half(self) -> Outcome:
        """Sends the beginning of a request, waits a moment and leaves."""
        address = urlsplit(self._door().url)
        with suppress(OSError):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {self._key}\r\n"
                text = head + "content-type: application/json\r\ncontent-length: 500\r\n\r\n" + '{"model": "soak", "pro'
                writer.write(text[: self._dice.randrange(1, len(text))].encode())
                await writer.drain()
                await asyncio.sleep(self._dice.uniform(0.0, 0.5))
            finally:
                writer.close()
        return Outcome.LEFT

    async def _look(self, session: aiohttp.ClientSession) -> Outcome:
        """Asks for what describes the cluster."""
        path, status = self._dice.choice(list(_LOOKED_AT.items()))
        door, since = self._door(), time.monotonic()
        try:
            async with session.get(door.url + path, headers={"authorization": f"Bearer {self._key}"}) as response:
                await response.read()
                if response.status != status and not (response.status == 503 and self._disturbed(since)):
                    raise Unpromised(f"GET {path} has status {response.status}")
        except (aiohttp.ClientError, OSError) as exc:
            if not self._faults.hit(door.name, since):
                raise Unpromised(f"{exc!r} for GET {path} at {door.name}") from exc
            self._tally.causes[Cause.PROXY_LOST] += 1
        return Outcome.RIGHT
