"""A node in this process whose engine computes tokens from prompt, seed and position, a group of them a step.

Its answers are the same bytes in every run: the engine makes a step when the reader has taken the one before.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from llguidance import LLTokenizer

from pdserve.api.generation.engine_client import EngineClient, EngineState, PromptChoices
from pdserve.api.generation.generation import Generation, ReadPace
from pdserve.api.message.formats import NO_FORMATS, MessageFormats
from pdserve.api.node.node_metrics import NodeMetrics
from pdserve.api.node.serving_node import ServingNode, TicketGate
from pdserve.api.replay.replayable_answers import ReplayableAnswers, ReplayLimits
from pdserve.api.requests.grammar_check import START_S, GrammarCheck
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.api.routes.app import create_app
from pdserve.config import GrammarConfig, StreamConfig
from pdserve.control.frame import Purpose, Sealer
from pdserve.control.journal import digest
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.errors import EngineGone
from pdserve.grammars.compiling import compile_grammar
from pdserve.http.outlet import OUTLET, Outlet
from pdserve.http.routes import DirectRoutes
from pdserve.wire.discovery import NodeSizes, Role
from pdserve.wire.engine import EngineStats, FinishReason, PrefillSource, Ready, RequestOutput, RequestReport
from pdserve.wire.ids import new_id
from pdserve.wire.terms import TICKET_HEADER, AnswerIdentity, PrefillTarget, Resume, Terms, Ticket
from tests.api.node import MODEL
from tests.api.scripted_engine import EOS, MAX_MODEL_LEN, prompt_logprobs_of, reported
from tests.terms import made_ticket

PATIENCE_S = START_S + 30.0
"""A node's first request by a grammar waits for the process that tries it, which takes long on a busy machine."""
SECRET = b"the secret of a stepped node"
VOCAB_SIZE = 49_152
MAX_BODY_BYTES = 10_000
ANSWER = AnswerIdentity(bytes(range(16)), 1_700_000_000)
MOVE_TOKENS = 912
NOTHING_STORED = ReplayLimits(0, 0, 0.0)
TURNS = 8
"""The turns of the event loop that a reader needs at most to take a step."""
REPORT = RequestReport(
    prefill_source=PrefillSource.LOCAL, prefill_node="", cached_tokens=0, queue_s=0.0, prefill_s=0.0, transfer_s=0.0
)


@dataclass
class Running:
    """One choice under way."""

    prompt: PromptChoices
    seed: int
    token_ids: list[int]
    first_step: int = 0
    """The step before the one that gives its first token: it gives the log probabilities of the prompt."""
    parent: bool = False
    """Whether those of the prompt come to this choice."""


@dataclass
class SteppedEngine:
    """The part of an ``EngineClient`` that a node's routes use."""

    alphabet: Sequence[int]
    """The tokens that answers are made of."""
    group: int = 1
    """A step brings a choice to the next multiple of so many tokens."""
    fail_after: int | None = None
    """The number of steps after which every choice ends with an error."""
    lost_after: int | None = None
    """The number of steps after which the engine is lost."""
    script: Sequence[int] = ()
    """The tokens of every answer, where it is not to be made of the alphabet."""
    vocabulary: LLTokenizer | None = None
    """With it, answers to requests with a grammar follow that, and have no alphabet."""
    move_at: int | None = None
    """The step before which the engine wishes that another node goes on, with ``MOVE_TOKENS``."""
    state: EngineState = EngineState.READY
    opened: list[Sequence[PromptChoices]] = field(default_factory=list)
    fetched: list[tuple[PrefillTarget, ...]] = field(default_factory=list)
    """The holders of each answer whose KV cache was only fetched."""
    movable: list[bool] = field(default_factory=list)
    """Whether another node could go on with each answer."""

    def open(
        self,
        prompts: Sequence[PromptChoices],
        terms: Terms,
        pace: ReadPace,
    ) -> Generation:
        self.opened.append(prompts)
        self.movable.append(terms.movable)
        if terms.fetch_only:
            self.fetched.append(terms.holders)
        choices = [(prompt, choice) for prompt in prompts for choice in prompt.choices]
        # Prompts whose log probabilities are wanted are computed one after the other.
        places = {id(prompt): place for place, prompt in enumerate((p for p in prompts if _is_scored(p)), 1)}
        running = {
            local_id: Running(
                prompt,
                choice.seed,
                list(choice.emitted),
                places.get(id(prompt), 0),
                parent=choice is prompt.choices[0],
            )
            for local_id, (prompt, choice) in enumerate(choices, 1)
        }

        def abort(local_ids: Sequence[int]) -> None:
            for local_id in local_ids:
                running.pop(local_id, None)

        numbers = {local_id: choice.index for local_id, (_, choice) in enumerate(choices, 1)}
        generation = Generation(numbers, terms.deadline_s, abort, pace)
        self._run = asyncio.create_task(self._steps(generation, running, fetch_only=terms.fetch_only))
        return generation

    async def _steps(self, generation: Generation, running: dict[int, Running], *, fetch_only: bool) -> None:
        step = 0
        while running:
            if step == self.lost_after:
                generation.fail(EngineGone("the engine of this node failed", code="engine_error"))
                return
            step += 1
            if step == self.move_at:
                generation.want_move(MOVE_TOKENS)
            for local_id, choice in list(running.items()):
                failed = self.fail_after is not None and step > self.fail_after
                if not (failed or fetch_only) and step < choice.first_step:
                    continue
                if failed or fetch_only:
                    output = RequestOutput(local_id, [], FinishReason.ERROR if failed else FinishReason.LENGTH)
                elif step == choice.first_step:
                    if not choice.parent:
                        continue
                    token_ids, count = choice.prompt.token_ids, choice.prompt.sampling.prompt_logprobs or 0
                    output = RequestOutput(local_id, [], prompt_logprobs=prompt_logprobs_of(token_ids[1:], count))
                else:
                    output = self._step(local_id, choice)
                if output.finish is not None:
                    del running[local_id]
                generation.put(output)
            generation.wake()
            for _ in range(TURNS):
                await asyncio.sleep(0)

    def _step(self, local_id: int, choice: Running) -> RequestOutput:
        finish = self._finish(choice) if choice.token_ids else None
        if finish is not None:
            return RequestOutput(local_id, [], finish, REPORT)
        new: list[int] = []
        while finish is None and (not new or len(choice.token_ids) % self.group):
            new.append(self._token(choice))
            choice.token_ids.append(new[-1])
            finish = self._finish(choice)
        logprobs = reported(new, choice.prompt.sampling)
        return RequestOutput(local_id, new, finish, REPORT if finish else None, logprobs=logprobs)

    def _token(self, choice: Running) -> int:
        if self.script:
            return self.script[len(choice.token_ids)]
        place = f"{choice.prompt.token_ids} {choice.seed} {len(choice.token_ids)}"
        alphabet = self.alphabet if self.vocabulary is None else self._open_tokens(choice, self.vocabulary)
        return alphabet[zlib.crc32(place.encode()) % len(alphabet)]

    def _open_tokens(self, choice: Running, vocabulary: LLTokenizer) -> Sequence[int]:
        grammar = choice.prompt.sampling.grammar
        assert grammar is not None
        matcher = GrammarMatcher(compile_grammar(grammar, vocabulary), choice.token_ids)
        bits = matcher.open_bits(choice.token_ids, VOCAB_SIZE)
        assert matcher.failure is None
        open_ids: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        return open_ids

    def _finish(self, choice: Running) -> FinishReason | None:
        """Why the choice's tokens end it."""
        sampling, count = choice.prompt.sampling, len(choice.token_ids)
        ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,)))
        if choice.token_ids[-1] in ends and count > sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= sampling.max_tokens else None


def _is_scored(prompt: PromptChoices) -> bool:
    return prompt.sampling.prompt_logprobs is not None and len(prompt.token_ids) > 1


class Cycle:
    """The server's side of a request and its response."""

    more_body = True
    disconnected = False
    response_started = response_complete = False
    chunked_encoding = False
    keep_alive = True
    waiting_for_100_continue = False
    scope: Any = {"method": "POST"}  # noqa: RUF012  # as uvicorn has it
    default_headers: Sequence[tuple[bytes, bytes]] = ()

    def on_response(self) -> None:
        pass


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False


class Flow:
    """The flow control of a client that reads everything at once."""

    write_paused = False

    async def drain(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@dataclass(frozen=True)
class Reply:
    """A whole response."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.body)["error"])


@dataclass
class SteppedNode:
    """A node that takes requests with tickets alone."""

    app: DirectRoutes
    engine: SteppedEngine
    metrics: NodeMetrics
    boot_id: bytes
    replayable: ReplayableAnswers
    sealer: Sealer = field(default_factory=lambda: Sealer(SECRET, Purpose.TICKET, new_id()))

    def ticket(self, **more: Any) -> Ticket:
        return made_ticket(self.boot_id, **more)

    async def begin(self, path: str, body: dict[str, Any], answer: AnswerIdentity | None = ANSWER) -> Reply:
        """Asks for an answer from its beginning."""
        return await self.ask(path, json.dumps(body).encode(), self.ticket(answer=answer))

    async def resume(self, path: str, body: dict[str, Any], journal: bytes, **more: Any) -> Reply:
        """Asks for what follows ``journal``."""
        resume = Resume(len(journal), digest(journal))
        ticket = self.ticket(**{"answer": ANSWER, "resume": resume, **more})
        return await self.ask(path, json.dumps(body).encode() + journal, ticket)

    async def prepare(self, path: str, body: dict[str, Any], journal: bytes, **more: Any) -> Reply:
        """Asks to be ready for what follows ``journal``."""
        resume = Resume(len(journal), digest(journal), prepare=True)
        return await self.resume(path, body, journal, resume=resume, **more)

    async def ask(self, path: str, data: bytes, ticket: Ticket | None) -> Reply:
        sealed = b"" if ticket is None else base64.urlsafe_b64encode(self.sealer.seal(ticket)).rstrip(b"=")
        transport, begun, body = Transport(), [], []
        headers: dict[str, str] = {}
        outlet = Outlet(transport, Flow(), lambda: None)
        outlet.begin(cast("Any", Cycle()))
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [] if ticket is None else [(TICKET_HEADER.encode(), sealed)],
            "client": ("127.0.0.1", 1),
            "extensions": {OUTLET: outlet},
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                begun.append(message["status"])
                headers.update((name.decode(), value.decode()) for name, value in message["headers"])
            else:
                transport.write(message["body"])
                body.append(message["more_body"])

        # The app answers nothing if it is cancelled, as for a client that has left.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.app(scope, receive, send), PATIENCE_S)
        assert begun or transport.written, f"no answer in {PATIENCE_S:g} s"
        if begun:
            assert body[-1] is False, "the response is whole"
            return Reply(begun[0], transport.written, headers)
        head, _, content = transport.written.partition(b"\r\n\r\n")
        fields = (line.partition(": ") for line in head.decode().split("\r\n")[1:])
        return Reply(int(head.split()[1]), content, {name: value for name, _, value in fields})


@asynccontextmanager
async def stepped_node(
    tokenizer: Tokenizer,
    alphabet: Sequence[int],
    group: int = 1,
    *,
    formats: MessageFormats = NO_FORMATS,
    model_dir: Path = Path(),
    limits: ReplayLimits = NOTHING_STORED,
    **engine_fields: Any,
) -> AsyncIterator[SteppedNode]:
    engine, boot_id = SteppedEngine(alphabet, group, **engine_fields), new_id()
    node = ServingNode(
        name="stepped",
        role=Role.DECODE,
        model=MODEL,
        engine=cast("EngineClient", engine),
        ready=Ready(
            control="",
            fingerprint="f" * 32,
            num_blocks=100,
            block_size=16,
            max_model_len=MAX_MODEL_LEN,
            max_running=8,
            vocab_size=VOCAB_SIZE,
        ),
        sizes=NodeSizes("tiny", "float32", "CPU, 1 core", "torch", 1, 1, 64, 64, 8, 64),
        tokenizer=tokenizer,
        tickets=TicketGate(SECRET, boot_id),
        metrics=NodeMetrics(EngineStats),
        timeout_s=60.0,
        max_body_bytes=MAX_BODY_BYTES,
        stream=StreamConfig(),
        formats=formats,
        grammars=GrammarCheck(model_dir, GrammarConfig()),
        replayable=ReplayableAnswers(limits),
    )
    try:
        yield SteppedNode(create_app(node), engine, node.metrics, boot_id, node.replayable)
    finally:
        node.replayable.drain()
        node.preparer.close()
        node.grammars.close()
