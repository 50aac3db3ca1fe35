"""Clients that stream answers through the client Service, and keep what they saw."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from lab.deploy_containers.stand_in.pod_network import socket_on
from tests.hosts.namespaces import Host

MODEL = "smollm2-135m-instruct"
_ANSWER_S = 180.0
_RETRY_S = 0.5


@dataclass
class Answer:
    """One streamed answer."""

    prompt: str
    begun: float
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    """When each piece of text arrived."""
    failure: str = ""
    """Empty if the answer is whole."""
    retries: int = 0
    """How often the client has asked again."""
    last_event: str = ""
    """The id of the last event, if events have ids."""

    @property
    def longest_gap_s(self) -> float:
        return max((later - earlier for earlier, later in itertools.pairwise(self.arrivals)), default=0.0)


@dataclass
class Client:
    """Asks at one URL from one host, over connections that it keeps open, as OpenAI's client does."""

    url: str
    session: aiohttp.ClientSession

    async def ask(self, prompt: str, max_tokens: int, arrived: asyncio.Event | None = None, retries: int = 0) -> Answer:
        """Returns the answer, whatever becomes of it. Sets ``arrived`` with the first piece of text.

        With ``retries``, the request has a key, and a client that lost its connection goes on behind what it has got.
        """
        answer = Answer(prompt, time.monotonic())
        request = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Content-Type": "application/json"}
        if retries:
            headers["Idempotency-Key"] = uuid.uuid4().hex
        await self._try(answer, json.dumps(request).encode(), headers, arrived)
        while answer.failure and answer.retries < retries:
            await asyncio.sleep(_RETRY_S)
            answer.retries += 1
            if answer.last_event:
                headers["Last-Event-ID"] = answer.last_event
            await self._try(answer, json.dumps(request).encode(), headers, arrived)
        return answer

    async def _try(self, answer: Answer, body: bytes, headers: dict[str, str], arrived: asyncio.Event | None) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                async with self.session.post(f"{self.url}/v1/chat/completions", data=body, headers=headers) as response:
                    if response.status != 200:
                        answer.failure = f"{response.status}: {(await response.text())[:200]}"
                    else:
                        await _read(response, answer, arrived)
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            answer.failure = f"{type(exc).__name__}: {exc}"


async def _read(response: aiohttp.ClientResponse, answer: Answer, arrived: asyncio.Event | None) -> None:
    answer.failure = "the stream ended without [DONE]"
    event_id = ""
    async for line in response.content:
        field, _, value = line.decode().strip().partition(": ")
        if field == "id":
            event_id = value
        elif field == "data" and value == "[DONE]":
            answer.failure = ""
        elif field == "data":
            event = json.loads(value)
            if "error" in event:
                answer.failure = str(event["error"])[:200]
                return
            text = event["choices"][0]["delta"].get("content") if event["choices"] else None
            answer.last_event = event_id
            if text:
                answer.text += text
                answer.arrivals.append(time.monotonic())
                if arrived is not None:
                    arrived.set()


@asynccontextmanager
async def client_on(host: Host, url: str) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0, socket_factory=lambda _: socket_on(host))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Client(url, session)


@dataclass
class Load:
    """What clients saw that asked all the time."""

    references: dict[str, str]
    """The unbroken answer to each prompt."""
    answers: list[Answer] = field(default_factory=list)

    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._arrived.set()

    async def more(self, count: int) -> None:
        """Waits for so many more answers."""
        wanted = len(self.answers) + count
        async with asyncio.timeout(_ANSWER_S * count):
            while len(self.answers) < wanted:
                self._arrived.clear()
                await self._arrived.wait()

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.failure]

    @property
    def wrong(self) -> list[Answer]:
        """Returns the answers that are whole, and not the unbroken ones."""
        return [each for each in self.answers if not each.failure and each.text != self.references[each.prompt]]

    @property
    def longest_gap_s(self) -> float:
        return max((answer.longest_gap_s for answer in self.answers), default=0.0)


@asynccontextmanager
async def load(
    client: Client, references: dict[str, str], clients: int, max_tokens: int, retries: int = 0
) -> AsyncIterator[Load]:
    """Keeps so many answers under way during the block. At its end, those under way come to theirs."""
    seen, stopping = Load(references), asyncio.Event()

    async def keep_asking(prompts: Sequence[str]) -> None:
        for prompt in itertools.cycle(prompts):
            if stopping.is_set():
                return
            answer = await client.ask(prompt, max_tokens, retries=retries)
            seen.add(answer)
            if answer.failure:
                # Not a client that asks a thousand times a second where nobody answers.
                await asyncio.sleep(0.5)

    prompts = list(references)
    async with asyncio.TaskGroup() as group:
        for i in range(clients):
            group.create_task(keep_asking(prompts[i % len(prompts) :] + prompts[: i % len(prompts)]))
        try:
            yield seen
        finally:
            stopping.set()
