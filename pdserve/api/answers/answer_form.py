"""The form of an answer: what differs between chat and text completions, and what the client asked for.

``PlainChoices`` holds the encoded choices of chunks that carry text and nothing else: all but the text is the same
in every response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

import msgspec
from msgspec import UNSET

from pdserve.api.answers.detokenizer import Detokenizer
from pdserve.api.answers.logprobs import CompleteLogprobs, ShownLogprobs, ShownToken, finite
from pdserve.api.answers.openai_response import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Choice,
    ChunkChoice,
    Completion,
    Finish,
    PromptTokenLogprob,
    StopReason,
    TextChoice,
    TextChunkChoice,
    TextLogprobs,
    ToolCall,
    ToolCallDelta,
)
from pdserve.api.answers.text_generation import TextDelta
from pdserve.api.generation.request_log import ChoiceOutcome
from pdserve.api.message.parts import CallPiece, MessageParts
from pdserve.control.journal import Journal
from pdserve.wire.sampling_params import PromptLogprobs, TokenLogprobs
from pdserve.wire.terms import AnswerIdentity

CallId: TypeAlias = Callable[[int, int], str]
"""Returns the id of a call, by the numbers of its choice and of itself."""
_SHORT_ID, _LONG_ID = 9, 24
"""The lengths of ids of calls."""


class ChatForm:
    """The form of an answer to ``/v1/chat/completions``."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def logprobs(self, shown: ShownLogprobs) -> ChatLogprobs:
        return shown.for_chat()

    def choice(
        self, index: int, parts: MessageParts, finish: Finish, logprobs: msgspec.Raw | None, call_id: CallId
    ) -> Choice:
        message = ChatMessage(parts.content or (None if parts.reasoning or parts.calls else ""))
        if parts.reasoning:
            message.reasoning = message.reasoning_content = parts.reasoning
        if parts.calls:
            message.tool_calls = [
                ToolCall(call_id(index, piece.index), CalledFunction(piece.arguments, piece.name or ""))
                for piece in parts.calls
            ]
        return ChatChoice(index, message, finish, logprobs)

    def completion(
        self, complete: Completion, prompt_ids: Sequence[list[int]] | None, scores: Sequence[msgspec.Raw | None]
    ) -> Completion:
        """Returns ``complete`` with its prompts' tokens and their log probabilities, given by choice, or with null."""
        complete.prompt_token_ids = None if prompt_ids is None else prompt_ids[0]
        complete.prompt_logprobs = scores[0]
        return complete

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice:
        delta = ChatDelta("assistant" if first else UNSET, text)
        return ChatChunkChoice(index, delta, logprobs=None if logprobs is None else logprobs.for_chat())

    def message_chunk(
        self, index: int, parts: MessageParts, logprobs: ShownLogprobs | None, call_id: CallId, *, first: bool
    ) -> ChunkChoice:
        """Returns a chunk that has more than content."""
        delta = ChatDelta("assistant" if first else UNSET, parts.content or UNSET)
        if parts.reasoning:
            delta.reasoning = delta.reasoning_content = parts.reasoning
        if parts.calls:
            delta.tool_calls = [_call_delta(piece, call_id(index, piece.index)) for piece in parts.calls]
        return ChatChunkChoice(index, delta, logprobs=None if logprobs is None else logprobs.for_chat())

    def last_chunk(self, index: int, finish: Finish, stop_reason: StopReason, matched_stop: StopReason) -> ChunkChoice:
        return ChatChunkChoice(index, ChatDelta(), finish, stop_reason=stop_reason, matched_stop=matched_stop)


def _call_delta(piece: CallPiece, call_id: str) -> ToolCallDelta:
    if piece.name is None:
        return ToolCallDelta(piece.index, CalledFunction(piece.arguments))
    return ToolCallDelta(piece.index, CalledFunction(piece.arguments, piece.name), call_id, "function")


class TextForm:
    """The form of an answer to ``/v1/completions``."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def logprobs(self, shown: ShownLogprobs) -> TextLogprobs:
        return shown.for_text()

    def choice(
        self, index: int, parts: MessageParts, finish: Finish, logprobs: msgspec.Raw | None, _call_id: CallId
    ) -> Choice:
        return TextChoice(index, parts.content, finish, logprobs)

    def completion(
        self, complete: Completion, prompt_ids: Sequence[list[int]] | None, scores: Sequence[msgspec.Raw | None]
    ) -> Completion:
        """Returns ``complete`` with its prompts' tokens and their log probabilities, given by choice, or with null."""
        for choice in complete.choices:
            if isinstance(choice, TextChoice):
                choice.prompt_token_ids = None if prompt_ids is None else prompt_ids[choice.index]
                choice.prompt_logprobs = scores[choice.index]
        return complete

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice:
        return TextChunkChoice(index, text, logprobs=None if logprobs is None else logprobs.for_text())

    def message_chunk(
        self, index: int, parts: MessageParts, logprobs: ShownLogprobs | None, _call_id: CallId, *, first: bool
    ) -> ChunkChoice:
        return self.chunk(index, parts.content, logprobs, first=first)

    def last_chunk(self, index: int, finish: Finish, stop_reason: StopReason, matched_stop: StopReason) -> ChunkChoice:
        return TextChunkChoice(index, "", finish, stop_reason=stop_reason, matched_stop=matched_stop)


AnswerForm: TypeAlias = ChatForm | TextForm

CHAT_FORM = ChatForm()
TEXT_FORM = TextForm()

_NO_TEXT = b'""'
"""An empty text, encoded. Nothing that follows the text of a plain choice looks like it."""


@dataclass(frozen=True, slots=True)
class PlainChoice:
    """The encoded choices of one index."""

    first: tuple[bytes, bytes]
    """The bytes before and after the text of its first chunk."""
    later: tuple[bytes, bytes]
    last: dict[tuple[ChoiceOutcome, int | None], bytes]
    """The choice of the chunk with the finish reason, where no stop string or stop token of the request has ended it.

    The models' own last tokens are few.
    """


class PlainChoices(dict[int, PlainChoice]):
    """The plain choices of one form by index. Each is encoded when it is first asked for."""

    def __init__(self, form: AnswerForm) -> None:
        super().__init__()
        self._form = form

    def __missing__(self, index: int) -> PlainChoice:
        form = self._form
        choice = self[index] = PlainChoice(
            _around(form.chunk(index, "", None, first=True)), _around(form.chunk(index, "", None, first=False)), {}
        )
        return choice

    def last(self, delta: TextDelta, outcome: ChoiceOutcome) -> bytes:
        """Returns the encoded choice of the chunk with the finish reason of ``delta``, the last one of its choice."""
        form, index = self._form, delta.choice
        if delta.stop_reason is not None:
            return msgspec.json.encode(form.last_chunk(index, outcome.finish, delta.stop_reason, delta.stop_reason))
        known, end = self[index].last, (outcome, delta.end_token)
        if end not in known:
            known[end] = msgspec.json.encode(form.last_chunk(index, outcome.finish, None, delta.end_token))
        return known[end]


def _around(choice: ChunkChoice) -> tuple[bytes, bytes]:
    before, _, after = msgspec.json.encode(choice).rpartition(_NO_TEXT)
    return before, after


def _no_detokenizer(_choice: int) -> Detokenizer:
    raise AssertionError("the log probabilities of a prompt came that nobody asked for")


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the client asked for, what the prompts of its request are, and what it has of the answer already."""

    answer: AnswerIdentity
    model: str
    fingerprint: str
    prompt_ids: Sequence[list[int]]
    """Each choice has its prompt's tokens here."""
    echoes: Sequence[str]
    """Each choice has a text here that is shown before its own."""
    token_bytes: Callable[[int], bytes]
    """Returns the bytes of one token by itself."""
    logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Whether every chunk says how many tokens were used so far."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether log probabilities name tokens by their ids."""
    named_tokens: bool = False
    """Whether the client has named the tokens that are reported beside each chosen one."""
    plain: PlainChoices | None = None
    """The plain choices of the form, for the fast path; None if every answer takes the full one."""
    journaled: bool = False
    """Whether each event of a stream begins with an entry of the journal."""
    journal: Journal = field(default_factory=Journal)
    """What the client has from other nodes."""
    resumed: Sequence[TextDelta] = ()
    """The texts of the journal's groups, for a stream of event groups, but for that of the last group."""
    short_call_ids: bool = False
    """Whether calls have ids of nine letters and digits, as Mistral's templates want them."""

    choices: int = 1
    """How many answers each prompt gets."""
    shown_choices: int = 1
    """How many of them the client gets: the likeliest."""
    echo_logprobs: int | None = None
    """How many of the likeliest tokens are reported beside each token of an echoed prompt, if any are reported."""
    prompt_logprobs: int | None = None
    """The same in the list of ``prompt_logprobs``."""
    cached_block: int = 0
    """How many tokens each block has that a prefix cache keeps of the prompt; 0 if there is no cache."""
    stored: bool = False
    """Whether the proxy stores the response, so that the client can ask for it again."""
    detokenizer: Callable[[int], Detokenizer] = _no_detokenizer
    """Returns a detokenizer for the echoed prompt of a choice."""

    def call_id(self, choice: int, call: int) -> str:
        """Returns the id of a tool call, which is the same at every node."""
        size, prefix = (_SHORT_ID, "") if self.short_call_ids else (_LONG_ID, "call_")
        return prefix + blake2b(b"call %d %d" % (choice, call), key=self.answer.id, digest_size=16).hexdigest()[:size]

    def prompt_of(self, choice: int) -> int:
        """Returns the number of the choice's prompt."""
        return choice // self.choices

    def shown_prompt(self, tokens: Sequence[ShownToken]) -> ShownLogprobs:
        """Returns what an answer reports of these tokens of an echoed prompt."""
        return ShownLogprobs(tokens, self.token_bytes, 0, self.tokens_as_ids)

    def shown(self, choice: int, tokens: Sequence[ShownToken]) -> ShownLogprobs:
        """Returns what an answer or chunk reports of these tokens."""
        offset = len(self.echoes[choice])
        return ShownLogprobs(tokens, self.token_bytes, offset, self.tokens_as_ids, self.named_tokens)


_PIECE_ENTRIES = 1_024
"""About so many log probabilities are encoded at once."""

_encoder = msgspec.json.Encoder()


class PromptScores:
    """What has come of the prompts' log probabilities."""

    def __init__(self, form: AnswerForm, options: AnswerOptions) -> None:
        self._form = form
        self._options = options
        self._packed: dict[int, PromptLogprobs] = {}
        """Those that are not encoded yet, by a choice of the prompt. JSON takes ten times their memory."""
        self._echoed: dict[int, CompleteLogprobs] = {}
        self._listed: dict[int, msgspec.Raw] = {}

    def take(self, deltas: Sequence[TextDelta]) -> None:
        """Takes the log probabilities of prompts that have come with these deltas."""
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                self._packed[delta.choice] = delta.prompt_logprobs

    async def encode(self) -> None:
        """Encodes what was taken, in several turns of the event loop. It has to be done before anything is shown."""
        while self._packed:
            await self._encode(*self._packed.popitem())

    def echoed(self, choice: int) -> CompleteLogprobs | None:
        """Returns the log probabilities of the choice's echoed prompt, to be continued; None if they are not shown."""
        options = self._options
        if options.echo_logprobs is None:
            return None
        prompt = options.prompt_of(choice)
        if prompt not in self._echoed:
            # A prompt of one token has no log probability, and the engine sends none.
            self._echoed[prompt] = CompleteLogprobs()
            self._echoed[prompt].add(self._shown(choice, [ShownToken(options.prompt_ids[choice][0], None, 0)]))
        return self._echoed[prompt].copy()

    def listed(self, choice: int) -> msgspec.Raw | None:
        """Returns ``prompt_logprobs`` of the choice as JSON, or None if they were not asked for."""
        if self._options.prompt_logprobs is None:
            return None
        return self._listed.get(self._options.prompt_of(choice), msgspec.Raw(b"[null]"))

    def _shown(self, choice: int, tokens: Sequence[ShownToken]) -> ChatLogprobs | TextLogprobs:
        return self._form.logprobs(self._options.shown_prompt(tokens))

    async def _encode(self, choice: int, logprobs: PromptLogprobs) -> None:
        options = self._options
        token_ids, echo = options.prompt_ids[choice], len(options.echoes[choice])
        detokenizer, chars = options.detokenizer(choice), 0
        whole, listed = CompleteLogprobs(), [b"null"]
        for start in range(0, len(token_ids), size := max(_PIECE_ENTRIES // (1 + logprobs.top_count), 1)):
            ids = token_ids[start : start + size]
            # The first token has none: what is known of a token stands one place before it.
            known = logprobs.tokens(max(start - 1, 0), start + len(ids) - 1)
            if options.echo_logprobs is not None:
                shown = []
                for token_id, own in zip(ids, [*([None] if start == 0 else []), *known], strict=True):
                    shown.append(ShownToken(token_id, _first(own, options.echo_logprobs), min(chars, echo)))
                    chars += len(detokenizer.add((token_id,)))
                whole.add(self._shown(choice, shown))
            if options.prompt_logprobs is not None:
                counted = ids[1:] if start == 0 else ids
                listed += [self._entry(token_id, own) for token_id, own in zip(counted, known, strict=True)]
            await asyncio.sleep(0)
        prompt = options.prompt_of(choice)
        self._echoed[prompt] = whole
        self._listed[prompt] = msgspec.Raw(b"[%b]" % b",".join(listed))

    def _entry(self, token_id: int, own: TokenLogprobs) -> bytes:
        """Returns what is said of one token: an object with an entry for it, and for each of the likeliest."""
        entries = {str(token_id): self._token(token_id, own.chosen, own.rank)}
        for rank, (top_id, logprob) in enumerate(own.top[: self._options.prompt_logprobs], 1):
            entries.setdefault(str(top_id), self._token(top_id, logprob, rank))
        return _encoder.encode(entries)

    def _token(self, token_id: int, logprob: float, rank: int) -> PromptTokenLogprob:
        return PromptTokenLogprob(finite(logprob), rank, self._options.token_bytes(token_id).decode(errors="replace"))


def _first(own: TokenLogprobs | None, count: int) -> TokenLogprobs | None:
    """Returns the log probabilities with no more than ``count`` of the likeliest tokens."""
    if own is None or len(own.top) <= count:
        return own
    return TokenLogprobs(own.chosen, own.rank, own.top[:count])
