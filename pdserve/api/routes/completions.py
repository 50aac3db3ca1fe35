"""Answers the routes that generate text, from the body to the last byte: completions, and the dialects of chat."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import msgspec

from pdserve.api.answers.answer import CompleteAnswer, OpenAiAnswers, complete_answer, respond_journaled
from pdserve.api.answers.answer_form import CHAT_FORM, TEXT_FORM, AnswerOptions, PlainChoices
from pdserve.api.answers.stop_strings import ContentStops, Stops, StopStrings, StopTable
from pdserve.api.answers.text_generation import ChoiceText, TextDelta, TextGeneration
from pdserve.api.call_grammars.tool_grammar import rules_before, tool_grammar
from pdserve.api.dialects.dialect_answers import DialectParser, MessagesAnswers, ResponsesAnswers
from pdserve.api.dialects.dialect_request import MESSAGES_NAMES, RESPONSES_NAMES, TranslatedChat, in_own_names, own_name
from pdserve.api.dialects.messages_request import MessagesRequest, chat_of_messages, unheeded_fields_of_messages
from pdserve.api.dialects.responses_request import ResponsesRequest, chat_of_response
from pdserve.api.generation.engine_client import PromptChoices, WantedChoice
from pdserve.api.generation.generation import TURN_TOKENS, Generation, ReadPace
from pdserve.api.generation.request_log import NodeNotes, RequestRecord, failure_of
from pdserve.api.message.message_parser import MessageParser
from pdserve.api.node.serving_node import ServingNode
from pdserve.api.replay.answer_log import ReplayableAnswer
from pdserve.api.requests.answer_reading import AnswerReading, answer_reading
from pdserve.api.requests.chat_messages import unheeded_fields, unread_part_fields
from pdserve.api.requests.grammar_check import WantedGrammar
from pdserve.api.requests.openai_request import BodyParser, ChatRequest, CompletionRequest, GenerationRequest, Parsed
from pdserve.api.requests.preparing import Check
from pdserve.api.requests.prompts import ModelLimits, Prompt, chat_prompts, completion_prompts
from pdserve.api.requests.resumed_answer import (
    read_journal,
    resume_before_last_group,
    resume_texts,
    split_body,
    split_history,
)
from pdserve.api.requests.sampling_fields import (
    TokenRuns,
    bad_word_tokens,
    check_best_of,
    check_logprobs,
    check_repeated,
    check_repeated_grammar,
    check_scores,
    check_shown_prompts,
    choice_seeds,
    sampling_params,
)
from pdserve.api.requests.structured_outputs import wanted_calls, wanted_grammar
from pdserve.api.requests.tokenizer import TemplateFailed, Tokenizer
from pdserve.config import Switch
from pdserve.control.journal import Journal, move_block
from pdserve.errors import DeadlineExceeded, InvalidRequest, NotFound
from pdserve.http.request import JSON, TRACEPARENT, HttpRequest, Reply, request_label
from pdserve.tracing.timeline import TimelineNotes
from pdserve.wire.ids import new_id
from pdserve.wire.sampling_params import Grammar
from pdserve.wire.terms import (
    MAX_CLIENT_BYTES,
    TICKET_HEADER,
    AnswerIdentity,
    Keep,
    Prepared,
    PromptTerms,
    RequestTargets,
    Terms,
    Ticket,
)
from pdserve.wire.timeline import PhaseKind, ProcessKind, TraceContext

IGNORED_HEADER = "x-pdserve-ignored"
MAX_IGNORED = 20
EVENT_STREAM = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
WHOLE_INTERVAL = 256
"""How many tokens of a complete answer become text at once. More would hold up the tokens of other requests."""

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=GenerationRequest)
R_contra = TypeVar("R_contra", bound=GenerationRequest, contravariant=True)
Parse = Callable[[bytes, bytes | None], Parsed[R]]
"""Returns the request in a body. Raises InvalidRequest, which names the field if one is at fault.

The second argument has the items before the request's own, as JSON; None if no proxy stores responses.
"""
MakePrompts = Callable[[R, Tokenizer, ModelLimits, int, Check], list[Prompt]]
"""The fourth argument is when the answer was asked for."""


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """What is known of a request before its body is: its terms, by its ticket or by the node's own settings."""

    terms: Terms
    deadline: float
    """A time of ``time.monotonic``: that of ``terms.deadline_s``."""
    answer: AnswerIdentity
    """That of the terms, or a new one."""
    attempt: int = 0

    @property
    def journaled(self) -> bool:
        """Whether the answer has a journal."""
        return self.terms.answer is not None

    @property
    def keep(self) -> Keep | None:
        """Has the answer stored for a client that may ask again; None if it will not, or nothing is to be answered."""
        return None if self.terms.fetch_only else self.terms.keep

    @property
    def appended_bytes(self) -> int:
        """How many bytes follow the client's body."""
        resume, storing = self.terms.resume, self.terms.storing
        journal = 0 if resume is None else resume.journal_bytes
        return journal + (0 if storing is None else storing.history_bytes)


class RequestBody:
    """The body of a request, until somebody takes it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def last(self, size: int) -> bytes:
        """Returns its last ``size`` bytes."""
        return self._data[len(self._data) - size :]

    def take(self) -> bytes:
        """Returns it, and keeps nothing of it."""
        data, self._data = self._data, b""
        return data


@dataclass(frozen=True, slots=True)
class PreparedRequest(Generic[R]):
    """The body of a request, and all that is made of it before the engine gets it."""

    parsed: Parsed[R]
    prompts: list[Prompt]
    texts: dict[int, ChoiceText]
    """The choices that are not over, by their numbers."""
    submits: list[PromptChoices]
    journal: Journal
    """What other nodes have generated. The client of a stream has it, any other one has nothing."""
    resumed: Sequence[TextDelta] = ()
    """What ``AnswerOptions.resumed`` says."""
    wanted: WantedGrammar | None = None
    """The grammar that the answers have to follow."""
    reasoning_before: int = 0
    """How many tokens of reasoning the choices have that are over for the client."""

    def constrained(self, grammar: Grammar) -> PreparedRequest[R]:
        """Returns the request with a grammar for the engine. Raises InvalidRequest for too many prompts."""
        check_repeated_grammar(grammar, len(self.submits))
        submits = [
            replace(submit, sampling=msgspec.structs.replace(submit.sampling, grammar=grammar))
            for submit in self.submits
        ]
        return replace(self, submits=submits)


class Answers(Protocol[R_contra]):
    """The answers of one route."""

    grouped: bool
    """Whether a stream is made of event groups (``pdserve.api.dialects.dialect_answers``)."""

    def stream(
        self, body: R_contra, generation: TextGeneration, first: Sequence[TextDelta], options: AnswerOptions
    ) -> AsyncGenerator[bytes, None]:
        """Returns the events of the answer to ``body``, as ``streamed_answer`` does."""

    def complete(self, body: R_contra, options: AnswerOptions) -> CompleteAnswer:
        """Returns the answer to ``body``, of which nothing has come yet."""


class CompletionRoute(Generic[R]):
    """One of the routes that generate text."""

    def __init__(
        self,
        node: ServingNode,
        parse: Parse[R],
        prompts: MakePrompts[R],
        answers: Answers[R],
        plain: PlainChoices | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``plain`` has the plain choices of the route's streams, if they may take the fast path.

        ``names`` are the route's own names of fields of a chat request.
        """
        self._node = node
        self._parse = parse
        self._prompts = prompts
        self._answers = answers
        self._names = names
        self._plain = plain if node.stream.fast_path is Switch.ON else None

    async def handle(self, request: HttpRequest) -> None:
        """Answers ``request``. Raises RequestError until the first byte has gone out."""
        arrived = time.monotonic()
        request.check_body_form()
        tokenizer = self._admit()
        admitted = self._admitted(request, arrived)
        if admitted.keep is not None:
            await self._answer_replayably(request, admitted.keep, admitted, tokenizer, arrived)
            return
        prepared = await self._prepared(request, await self._read(request, admitted), admitted, tokenizer)
        if admitted.terms.fetch_only:
            await self._fetch(request, prepared, admitted)
            return
        with closing(self._start(prepared, request, admitted, arrived)) as generation:
            await self._answer(request, generation, prepared, admitted, tokenizer)

    async def _answer_replayably(
        self, request: HttpRequest, keep: Keep, admitted: AdmittedRequest, tokenizer: Tokenizer, arrived: float
    ) -> None:
        """Answers a request whose client may ask again: with the answer that it has asked for before, or a new one."""
        body, answers = await self._read(request, admitted), self._node.replayable
        found = answers.find(keep, resumed=admitted.terms.resume is not None)
        if found is not None:
            body.take()  # the answer is there: nothing is read of the request any more
            await found.follow(request, keep.after)
            return
        entries = b"" if admitted.terms.resume is None else body.last(admitted.terms.resume.journal_bytes)

        async def produce(reply: Reply) -> None:
            prepared = await self._prepared(reply, body, admitted, tokenizer)
            if isinstance(reply, ReplayableAnswer):
                reply.describe(
                    journaled=self._journaled(prepared.parsed.request, admitted),
                    events=prepared.journal.events,
                    entries=entries,
                    places=len(prepared.texts),
                )
            with closing(self._start(prepared, request, admitted, arrived)) as generation:
                await self._answer(reply, generation, prepared, admitted, tokenizer)
                if isinstance(reply, ReplayableAnswer):
                    reply.spoilt = generation.failure is not None

        client = admitted.terms.client or keep.owner
        opened = answers.open(keep, admitted.answer, request.label, request.path, client, produce)
        if opened is None:
            await produce(request)
        else:
            await opened.follow(request, None, first=True)

    async def _read(self, request: HttpRequest, admitted: AdmittedRequest) -> RequestBody:
        return RequestBody(await request.body(self._node.max_body_bytes + admitted.appended_bytes))

    async def _prepared(
        self, reply: Reply, body: RequestBody, admitted: AdmittedRequest, tokenizer: Tokenizer
    ) -> PreparedRequest[R]:
        """Returns all that is made of the request before the engine gets it. Raises RequestError."""
        try:
            return await self._constrained(await self._parsed(reply, body, admitted, tokenizer), admitted)
        except InvalidRequest as error:
            if (own := in_own_names(error, self._names)) is error:
                raise
            raise own from error

    async def _parsed(
        self, reply: Reply, body: RequestBody, admitted: AdmittedRequest, tokenizer: Tokenizer
    ) -> PreparedRequest[R]:
        # With this call ends what keeps the body in memory.
        data = body.take()
        return await prepare(
            reply,
            self._node,
            len(data),
            lambda check: self._prepare(data, admitted, tokenizer, check),
            admitted.deadline - time.monotonic(),
            admitted.terms.client,
        )

    async def _constrained(self, prepared: PreparedRequest[R], admitted: AdmittedRequest) -> PreparedRequest[R]:
        """Returns the request with the grammar that it asks for, once that is known to compile."""
        if prepared.wanted is None:
            return prepared
        left_s = admitted.deadline - time.monotonic()
        grammar = await self._node.grammars.compiled(prepared.wanted, left_s, admitted.terms.client)
        return prepared.constrained(grammar)

    def _prepare(
        self, data: bytes, admitted: AdmittedRequest, tokenizer: Tokenizer, check: Check
    ) -> PreparedRequest[R]:
        """Returns what the engine needs. It knows of the request its body and its terms, and may run in a thread."""
        resume = admitted.terms.resume
        data, entries = (data, b"") if resume is None else split_body(data, resume)
        data, history = split_history(data, admitted.terms.storing)
        parsed = self._parse(data, history)
        body = parsed.request
        _check_consistent(body)
        check_model(body.model, self._node)
        check()
        prompts = self._prompts(body, tokenizer, self._node.limits, admitted.answer.created, check)
        check()
        if isinstance(body, ChatRequest):
            ignored = (*unread_part_fields(body.messages), *unheeded_fields(body, tokenizer.chat_template))
            own = tuple(own_name(name, self._names) for name in ignored)
            parsed = replace(parsed, ignored=parsed.ignored + own)
        bad_words = bad_word_tokens(body.bad_words or (), tokenizer)
        check_repeated(body, len(prompts), bad_words)
        check_scores(body, [prompt.token_ids for prompt in prompts])
        check_shown_prompts(body, prompts)
        vocab_size, journaled = self._node.ready.vocab_size, self._journaled(body, admitted) and bool(body.stream)
        journal = Journal() if resume is None else read_journal(entries, body, prompts, vocab_size)
        check()
        structure = wanted_grammar(body)
        reading = answer_reading(body, self._node.formats, structured=structure is not None)
        texts = _choice_texts(body, prompts, tokenizer, journal, reading, resumable=journaled)
        resumed: Sequence[TextDelta] = ()
        if self._grouped(body):
            resumed = resume_before_last_group(texts, journal)
        elif body.stream:
            resume_texts(texts, journal, logprobs=body.wanted_logprobs is not None)
        wanted = {number for number, text in texts.items() if not text.stopped}
        calls = tool_grammar(reading, prompts[0].ending, tokenizer.special_id, tokenizer.is_text_token)
        ends = _ending_ids(body, reading, tokenizer)
        submits = _submits(body, prompts, bad_words, ends, admitted.answer.id, wanted, journal)
        if calls is None:
            around = rules_before(reading, prompts[0].ending, tokenizer.special_id, tokenizer.is_text_token)
            grammar = None if structure is None else structure.within(around)
        else:
            grammar = wanted_calls(calls, reading.tools, structure)
        reasoning = _reasoning_of_ended(body, prompts, tokenizer, journal, reading)
        return PreparedRequest(parsed, prompts, texts, submits, journal, resumed, grammar, reasoning)

    def _admit(self) -> Tokenizer:
        self._node.check_serving()
        return self._node.tokenizer

    def _admitted(self, request: HttpRequest, arrived: float) -> AdmittedRequest:
        ticket = admit_ticket(request, self._node)
        if ticket is None:
            trace = self._node.tracing.begin(request.header(TRACEPARENT))
            prompt = PromptTerms(request_id=request.label, trace=trace)
            terms = Terms(prompt=prompt, deadline_s=self._node.timeout_s, client=client_of(request, ticket))
            return AdmittedRequest(terms, arrived + terms.deadline_s, _new_answer())
        terms = ticket.terms
        return AdmittedRequest(terms, arrived + terms.deadline_s, terms.answer or _new_answer(), ticket.attempt)

    def _start(
        self, prepared: PreparedRequest[R], request: HttpRequest, admitted: AdmittedRequest, arrived: float
    ) -> TextGeneration:
        label, notes = request.label, self._notes(request, admitted, arrived)
        generation = self._open(
            prepared, label, admitted, admitted.terms.prompt.trace if notes is None else notes.part.context
        )
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prepared.prompts)
        record = RequestRecord(label, self._node.name, arrived, prompt_tokens, notes=notes)
        body, generated = prepared.parsed.request, prepared.journal.choices
        repeated = {number: choice.last_group for number, choice in generated.items()} if self._grouped(body) else {}
        unshown = {} if body.stream else generated
        if admitted.terms.resume is not None:
            # Tokens that are repeated count when they are shown.
            known = sum(len(choice.token_ids) for choice in generated.values())
            record.resumed_tokens = known - sum(map(len, repeated.values()))
        metrics = self._node.metrics.requests
        if admitted.terms.resume is None:
            metrics.began(prepared.prompts, body.shown_choices)
        return TextGeneration(generation, prepared.texts, record, metrics, unshown, repeated, prepared.reasoning_before)

    def _notes(self, request: HttpRequest, admitted: AdmittedRequest, arrived: float) -> NodeNotes | None:
        """Returns what is noted of a request that has been read, if anything is to be noted."""
        parts = self._node.tracing.parts
        if not parts.wanted:
            return None
        notes = TimelineNotes(
            ProcessKind.API, request.label, arrived, admitted.terms.prompt.trace, attempt=admitted.attempt
        )
        notes.begin(PhaseKind.READ, arrived)
        notes.end(PhaseKind.READ, time.monotonic())
        return NodeNotes(notes, self._node.model, request.path, parts.add)

    def _journaled(self, body: R, admitted: AdmittedRequest) -> bool:
        """Returns whether the answer to ``body`` has a journal. Event groups have no log probabilities in theirs."""
        return admitted.journaled and not (self._grouped(body) and body.wanted_logprobs is not None)

    def _grouped(self, body: R) -> bool:
        """Returns whether the answer to ``body`` is a stream of event groups."""
        return self._answers.grouped and bool(body.stream)

    def _open(
        self, prepared: PreparedRequest[R], label: str, admitted: AdmittedRequest, trace: TraceContext | None
    ) -> Generation:
        """Gives the request to the engine, with what its terms get from its body, and from this node."""
        body, terms = prepared.parsed.request, admitted.terms
        self._node.check_serving()
        left_s = admitted.deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before it could start", code="deadline_exceeded")
        replayable = self._journaled(body, admitted) and (bool(body.stream) or body.has_complete_journal)
        terms = msgspec.structs.replace(
            terms,
            prompt=PromptTerms(
                request_id=label,
                priority=body.priority or 0,
                cache_salt=owned_salt(terms.cache_owner, body.cache_salt or ""),
                trace=trace,
            ),
            deadline_s=min(left_s, terms.deadline_s),
            own_targets=RequestTargets(body.target_ttft_ms, body.target_itl_ms),
            movable=replayable and not terms.fetch_only,
            # The client of several prompts may have tokens of one when the prefill node of another is lost.
            gives_back=terms.gives_back and len(prepared.submits) == 1 and not terms.fetch_only,
        )
        pace = ReadPace(_interval(body, self._node.stream.interval), _turn_tokens(body))
        return self._node.engine.open(prepared.submits, terms, pace)

    async def _fetch(self, request: HttpRequest, prepared: PreparedRequest[R], admitted: AdmittedRequest) -> None:
        """Has the engine fetch the KV cache of an answer that another node is generating, and says when it has it."""
        known = {
            choice.index: len(submit.token_ids) + len(choice.emitted)
            for submit in prepared.submits
            for choice in submit.choices
        }
        lacking: dict[int, int] = {}
        with closing(self._open(prepared, request.label, admitted, admitted.terms.prompt.trace)) as generation:
            while len(lacking) < len(known):
                for item in await generation.wait():
                    if (failure := generation.failure or failure_of(item.output)) is not None:
                        raise failure
                    generation.end_choice(item.choice)
                    report = item.output.report
                    lacking[item.choice] = known[item.choice] - (0 if report is None else report.reused_tokens)
        self._node.check_serving()
        log.info("request_id=%s prepared: the answer can go on here", request.label)
        await request.respond(200, JSON, msgspec.json.encode(Prepared(True, self._node.ready.block_size, lacking)))

    async def _answer(
        self,
        request: Reply,
        generation: TextGeneration,
        prepared: PreparedRequest[R],
        admitted: AdmittedRequest,
        tokenizer: Tokenizer,
    ) -> None:
        body, ignored = prepared.parsed.request, prepared.parsed.ignored
        per_choice = [prompt for prompt in prepared.prompts for _ in range(body.choices)]
        options = AnswerOptions(
            answer=admitted.answer,
            model=self._node.model,
            fingerprint=f"fp_{self._node.ready.fingerprint[:16]}",
            prompt_ids=[prompt.token_ids for prompt in per_choice],
            echoes=[prompt.echo for prompt in per_choice],
            token_bytes=tokenizer.token_bytes,
            logprobs=body.wanted_logprobs is not None,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            named_tokens=bool(body.logprob_token_ids),
            plain=self._plain,
            journaled=self._journaled(body, admitted),
            journal=prepared.journal,
            resumed=prepared.resumed,
            short_call_ids=self._node.formats.short_call_ids,
            choices=body.choices,
            shown_choices=body.shown_choices,
            cached_block=self._node.cached_block,
            stored=admitted.terms.storing is not None and admitted.terms.storing.stored,
            echo_logprobs=body.echo_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            detokenizer=lambda choice: tokenizer.detokenizer(skip_special_tokens=not per_choice[choice].echoes_special),
        )
        # No byte goes out before the engine's first output: an error until then still has its own status.
        first = await generation.next()
        if generation.failure is not None:
            raise generation.failure
        ignored_names = _printable_names(ignored)
        self._node.ignored_fields.note(admitted.terms.client, ignored_names, request.label)
        named = {IGNORED_HEADER: ",".join(ignored_names)} if ignored else {}
        if body.stream:
            events = self._answers.stream(body, generation, first, options)
            await _send_stream(request, {**EVENT_STREAM, **named}, events, generation)
            return
        answer = self._answers.complete(body, options)
        if options.journaled and body.has_complete_journal:
            await respond_journaled(request, named, generation, first, answer)
        else:
            data = await complete_answer(answer, generation, first)
            await request.respond(200, {**JSON, **named}, data)


def chat_route(node: ServingNode) -> CompletionRoute[ChatRequest]:
    return CompletionRoute(node, _plain(ChatRequest), chat_prompts, OpenAiAnswers(CHAT_FORM), PlainChoices(CHAT_FORM))


def text_route(node: ServingNode) -> CompletionRoute[CompletionRequest]:
    return CompletionRoute(
        node,
        _plain(CompletionRequest),
        lambda body, tokenizer, limits, _, check: completion_prompts(body, tokenizer, limits, check),
        OpenAiAnswers(TEXT_FORM),
        PlainChoices(TEXT_FORM),
    )


def responses_route(node: ServingNode) -> CompletionRoute[TranslatedChat]:
    parser = DialectParser(ResponsesRequest)

    def parse(data: bytes, history: bytes | None) -> Parsed[TranslatedChat]:
        return parser.parse(data, lambda request: chat_of_response(request, history))

    return CompletionRoute(node, parse, chat_prompts, ResponsesAnswers(), names=RESPONSES_NAMES)


def messages_route(node: ServingNode) -> CompletionRoute[TranslatedChat]:
    parser = DialectParser(MessagesRequest, unheeded_fields_of_messages)

    def parse(data: bytes, _history: bytes | None) -> Parsed[TranslatedChat]:
        return parser.parse(data, chat_of_messages)

    return CompletionRoute(node, parse, chat_prompts, MessagesAnswers(), names=MESSAGES_NAMES)


def _plain(request: type[R]) -> Parse[R]:
    """Returns how the bodies of a route are read that has no stored responses."""
    parser = BodyParser(request)
    return lambda data, _history: parser.parse(data)


def owned_salt(owner: bytes, salt: str) -> str:
    """Returns the salt of a request's cached blocks: its owner's, and within that the client's own.

    No two different pairs have one salt, so that no client can write another owner's.
    """
    return f"{owner.hex()}/{salt}" if owner or salt else ""


def admit_ticket(request: HttpRequest, node: ServingNode) -> Ticket | None:
    """Returns the ticket of ``request``, which gets the ticket's label; None if the node needs no tickets.

    Raises Unauthorized if the request has no ticket that is good here.
    """
    if node.tickets is None:
        return None
    ticket = node.tickets.admit(request.header(TICKET_HEADER.encode()))
    request.label = request_label(ticket.terms.prompt.request_id)
    return ticket


def client_of(request: HttpRequest, ticket: Ticket | None) -> bytes:
    """Returns what stands for the client of ``request``, for turns: its address where there is no ticket."""
    if ticket is not None:
        return ticket.terms.client
    address = request.address.encode(errors="replace")
    if len(address) <= MAX_CLIENT_BYTES:
        return address
    return hashlib.blake2b(address, digest_size=MAX_CLIENT_BYTES).digest()


async def prepare(
    request: Reply, node: ServingNode, size: int, work: Callable[[Check], T], timeout_s: float, client: bytes
) -> T:
    """Returns what ``work`` makes of the body of ``request``, as ``Preparer.run`` does; logs a failed chat template."""
    try:
        return await node.preparer.run(size, work, timeout_s, client)
    except TemplateFailed as error:
        log.info("request_id=%s a chat template failed: %s", request.label, error.detail)
        raise


def check_model(name: str | None, node: ServingNode) -> None:
    """Raises NotFound if ``name`` is not this node's model."""
    if name is not None and name != node.model:
        raise NotFound(
            f"the model {name[:200]!r} does not exist here; here is {node.model!r}",
            param="model",
            code="model_not_found",
        )


def _new_answer() -> AnswerIdentity:
    return AnswerIdentity(new_id(), int(time.time()))


def _choice_texts(
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    journal: Journal,
    reading: AnswerReading,
    *,
    resumable: bool,
) -> dict[int, ChoiceText]:
    """Returns the texts of all choices but those of which the client has the end."""
    stops, include = StopTable(body.stops), bool(body.include_stop_str_in_output)
    stop_ids, markers = frozenset(body.stop_token_ids or ()), reading.markers
    over = {number for number, choice in journal.choices.items() if choice.over}
    return {
        number: ChoiceText(
            number,
            tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False, shown=markers),
            _stops(stops, reading.parser(prompts[number // body.choices].ending), include=include),
            stop_ids if include else frozenset(),
            body.min_tokens or 0,
            stop_ids=stop_ids,
            special_ids=tokenizer.special_ids,
            resumable=resumable,
            parser=reading.parser(prompts[number // body.choices].ending),
            scores_only=body.scores_only,
            reports_end=bool(body.return_token_ids),
            reasoning=reading.reasoning_tokens(prompts[number // body.choices].ending, tokenizer.token_bytes),
        )
        for number in range(len(prompts) * body.choices)
        if number not in over
    }


def _stops(stops: StopTable, ahead: MessageParser | None, *, include: bool) -> Stops:
    """Returns what looks for the stop strings of one answer. ``ahead`` is a new parser of it; None if it has none."""
    if ahead is None or not stops.wanted:
        return StopStrings(stops, include=include)
    return ContentStops(stops, ahead, include=include)


def _reasoning_of_ended(
    body: GenerationRequest, prompts: Sequence[Prompt], tokenizer: Tokenizer, journal: Journal, reading: AnswerReading
) -> int:
    """Returns how many tokens of reasoning the choices have of which the client has the end."""
    total = 0
    for number, choice in journal.choices.items():
        tokens = reading.reasoning_tokens(prompts[number // body.choices].ending, tokenizer.token_bytes)
        if choice.over and tokens is not None:
            tokens.add(choice.token_ids)
            total += tokens.count
    return total


def _ending_ids(body: GenerationRequest, reading: AnswerReading, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end an answer because of its format."""
    if body.ignore_eos:
        return ()
    found = (tokenizer.added_id(text) for text in reading.formats.last_markers)
    return tuple(token_id for token_id in found if token_id is not None)


def _submits(
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    bad_words: TokenRuns,
    ends: tuple[int, ...],
    answer_id: bytes,
    wanted: Container[int],
    journal: Journal,
) -> list[PromptChoices]:
    """Returns the prompts that have any of the choices whose numbers are ``wanted``."""
    common = sampling_params(body, 0, 1, bad_words)
    if ends:
        common = msgspec.structs.replace(common, stop_token_ids=tuple(dict.fromkeys((*common.stop_token_ids, *ends))))
    submits = []
    for number, prompt in enumerate(prompts):
        choices = tuple(
            WantedChoice(index, seed, journal.emitted(index))
            for index, seed in enumerate(choice_seeds(body, answer_id, number), number * body.choices)
            if index in wanted
        )
        if choices:
            # A stream's client that has any event of a choice has the log probabilities of its prompt before that.
            scored = not body.stream or any(choice.index not in journal.choices for choice in choices)
            sampling = msgspec.structs.replace(
                common, max_tokens=prompt.max_tokens, prompt_logprobs=body.scored_logprobs if scored else None
            )
            submits.append(PromptChoices(prompt.token_ids, sampling, choices))
    return submits


def _interval(body: GenerationRequest, default: int) -> int:
    """Returns how many tokens of a choice are read at once."""
    if body.stream:
        return body.stream_interval or default
    # A token that the engine computes in vain, past a stop string, costs far more than a look for one.
    return 1 if body.stops else WHOLE_INTERVAL


def _turn_tokens(body: GenerationRequest) -> int:
    """Returns how many tokens become text at once. It is fewer where each token has log probabilities."""
    return TURN_TOKENS if body.sampled_logprobs is None else TURN_TOKENS // (1 + body.most_beside)


def _check_consistent(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true", param="stream_options")
    check_logprobs(body)
    check_best_of(body)


async def _send_stream(
    request: Reply, headers: Mapping[str, str], events: AsyncGenerator[bytes, None], generation: TextGeneration
) -> None:
    async with aclosing(events):
        await request.begin(200, headers, await anext(events), more=True)
        # Between two events, and also if no event comes: an answer that was preempted has none for long.
        generation.on_move_wanted(lambda tokens: request.write(move_block(tokens)))
        try:
            async for data in events:
                if not request.write(data):
                    await request.drain()
        finally:
            generation.on_move_wanted(None)
    await request.send(b"", more=False)


def _printable_names(names: Sequence[str]) -> list[str]:
    """Returns the names in a form that is safe in a header and the log, whatever clients call their fields."""
    return [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) for name in names[:MAX_IGNORED]]
