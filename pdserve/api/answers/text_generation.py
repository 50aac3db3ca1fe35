"""Turns the engine's tokens into the text that a client may see, choice by choice, and records how each choice went.

``ChoiceText`` has the detokenizer, the stop strings, the stop tokens and the message parser of one choice, in this
order: a parser gets the text that would be shown without it. The stop strings of an answer that is parsed are those of
its content (``ContentStops``). ``TextGeneration`` reads the generation of one client request, and records its times,
metrics and log line.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from pdserve.api.answers.detokenizer import Detokenizer
from pdserve.api.answers.logprobs import ShownToken, ShownTokens
from pdserve.api.answers.openai_response import StopReason
from pdserve.api.answers.stop_strings import Stops
from pdserve.api.generation.generation import TURN_TOKENS, ChoiceOutput, Generation
from pdserve.api.generation.request_log import (
    ChoiceOutcome,
    RequestRecord,
    failure_of,
    keep_part,
    log_request,
    outcome_of,
)
from pdserve.api.message.message_parser import MessageParser
from pdserve.api.message.parts import CallPiece, MessageParts, Piece, joined
from pdserve.api.message.reasoning import TokenCount
from pdserve.api.node.node_metrics import RequestMetrics
from pdserve.control.journal import JournaledChoice
from pdserve.errors import RequestError
from pdserve.wire.engine import FinishReason, RequestOutput, RequestReport
from pdserve.wire.sampling_params import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token, and the text that a delta has of it."""

    token: ShownToken
    text: str


def cut_at_tokens(text: str, start: int, tokens: Sequence[ShownToken]) -> list[TokenPiece]:
    """Returns ``text``, before which the answer has ``start`` characters, cut between ``tokens``."""
    starts = [min(max(token.offset - start, 0), len(text)) for token in tokens[1:]]
    bounds = [0, *starts, len(text)]
    return [TokenPiece(token, text[bounds[at] : bounds[at + 1]]) for at, token in enumerate(tokens)]


class ParsedTokens:
    """Finds the tokens of which the content of a choice is made, among those of its reasoning and calls.

    The text is parsed token by token. What a parser shows with a token is made of that token and, where the parser had
    held text back, of those before it.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[ShownToken, int]] = []
        """The tokens of which nothing is shown yet, and how many characters each of them has."""
        self._content: list[ShownToken] = []
        self._runs: list[int] = []
        """How many tokens each run of content has, since the last call of ``take``. Calls stand between runs."""
        self._gap = True

    def read(self, piece: TokenPiece, parser: MessageParser) -> MessageParts:
        """Gives the text of one token to ``parser`` and returns what that shows."""
        self._waiting.append((piece.token, len(piece.text)))
        parts = parser.add(piece.text)
        self.shown(parts)
        return parts

    def shown(self, parts: MessageParts) -> None:
        """Notes what a parser shows of the tokens that it has read."""
        if parts.content:
            tokens = list(self._last(len(parts.content)))
            self._content += reversed(tokens)
            if self._gap:
                self._runs.append(0)
            self._runs[-1] += len(tokens)
            self._gap = False
        self._gap |= bool(parts.calls or parts.reasoning)
        if parts.content or parts.reasoning or parts.calls:
            self._waiting = []

    def take(self) -> tuple[list[ShownToken], list[int]]:
        """Returns the tokens of the content that was shown since the last call, and how many each run of it has."""
        taken = self._content, self._runs
        self._content, self._runs, self._gap = [], [], True
        return taken

    def _last(self, chars: int) -> Iterator[ShownToken]:
        """Yields the last of the waiting tokens that have so many characters, and those without text before them."""
        for token, length in reversed(self._waiting):
            if chars <= 0 and length:
                return
            chars -= length
            yield token


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What is new of one choice."""

    choice: int
    text: str
    token_ids: Sequence[int]
    outcome: ChoiceOutcome | None
    """How the choice ended, in its last delta; None in all others."""
    tokens: Sequence[ShownToken] = ()
    """The tokens that ``text`` is made of, with their log probabilities, if the request asked for them."""
    stop_reason: StopReason = None
    """What of the request ended the choice, in its last delta."""
    end_token: int | None = None
    """The token by which the model itself ended the choice, in its last delta."""
    reasoning: str = ""
    """What the model thinks, which is not in ``text``."""
    calls: Sequence[CallPiece] = ()
    """Pieces of tool calls, which are not in ``text``."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log probabilities of the choice's prompt. Other choices may have the same prompt."""
    parsed_tokens: Sequence[ShownToken] | None = None
    """Those of ``tokens``, and of earlier deltas, that ``text`` is made of; None if all of ``tokens`` are."""
    parsed_runs: Sequence[int] = ()
    """How many of ``parsed_tokens`` each piece of content in ``order`` has."""
    order: Sequence[Piece] = ()
    """Text, reasoning and calls in the order in which they came, where there are several pieces."""

    @property
    def matched_stop(self) -> StopReason:
        """What ended the choice, in its last delta, be it the request's or the model's own."""
        return self.end_token if self.stop_reason is None else self.stop_reason

    @property
    def text_tokens(self) -> Sequence[ShownToken]:
        """The tokens of ``text``, without those of reasoning, calls and markers."""
        return self.tokens if self.parsed_tokens is None else self.parsed_tokens

    @property
    def shows(self) -> bool:
        """Whether a client sees anything of it but how the choice ended."""
        return bool(self.text or self.reasoning or self.calls)

    @property
    def only_fails(self) -> bool:
        """Whether it says nothing but that there will be no answer."""
        return self.outcome is not None and not self.outcome.is_answer and not (self.shows or self.token_ids)


class ChoiceText:
    """The text of one choice, with its detokenizer, stop strings, stop tokens and message parser."""

    def __init__(
        self,
        choice: int,
        detokenizer: Detokenizer,
        stop_strings: Stops,
        shown_stop_ids: frozenset[int],
        min_tokens: int = 0,
        *,
        stop_ids: frozenset[int] = frozenset(),
        special_ids: frozenset[int] = frozenset(),
        resumable: bool = False,
        parser: MessageParser | None = None,
        scores_only: bool = False,
        reports_end: bool = False,
        reasoning: TokenCount | None = None,
    ) -> None:
        """``shown_stop_ids`` are those of the stop tokens, ``stop_ids``, whose text belongs to the answer.

        The model's own end is one of the ``special_ids``, but only the engine knows which.
        No stop string ends with the text of the first ``min_tokens`` tokens. Where another node may go on with a choice
        that fails here (``resumable``), the failure does not show what is held back. Without ``parser`` all text is
        content. With ``scores_only``, the choice has no tokens, and ends where its first would be. With
        ``reports_end``, the log probabilities also have the token without text that ends the answer. ``reasoning``
        counts the tokens with which the choice thinks, if any do.
        """
        self._reasoning = reasoning
        self._parsed_tokens = ParsedTokens()
        self._scores_only = scores_only
        self._reports_end = reports_end
        self._choice = choice
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._shown_stop_ids = shown_stop_ids
        self._stop_ids = stop_ids
        self._special_ids = special_ids
        self._min_tokens = min_tokens
        self._resumable = resumable
        self._parser = parser
        self._num_tokens = 0
        self._resumed = False
        self._last_resumed: Sequence[int] = ()
        """The last token that the client has from another node."""
        self._stop_before: str | None = None
        """The stop string that ends the choice if its last token from another node is a stop token without text."""
        self._undecided = False
        """Whether a stop string ends with the last token from another node, which may be a stop token without text."""
        self._known_chars = 0
        """How many characters the stop strings hold back though the client has them, of a choice that was resumed."""
        self._num_chars = 0
        """How many characters the deltas had. It is counted where tokens have log probabilities."""
        self._shown_tokens = ShownTokens()
        self._held_text = ""
        self._held_ids: list[int] = []
        """The tokens of a resumable choice whose log probabilities are not reported. ``_held_text`` is their text."""

    def resume(self, token_ids: Sequence[int], *, logprobs: bool) -> TextDelta:
        """Takes the tokens that the client has from another node. Returns their text, which the client has too.

        ``logprobs`` says whether log probabilities are reported: then the client has all text of these tokens. The
        delta has the tokens that were read: up to the one with which a stop string has ended the choice.
        """
        self._resumed = True
        self._last_resumed = last = token_ids[-1:]
        if self._stop_strings.wanted:
            text, read = self._until_stop(token_ids[:-1], None)
            stopped_before, self._stop_before = self._stop_strings.found, self._stop_at_end()
            last_text, read_last = ("", 0) if stopped_before else self._until_stop(last, None)
            text, read = text + last_text, read + read_last
            self._undecided = self._stop_strings.found and not stopped_before and self._may_be_unshown(last)
        else:
            text, read = self._detokenizer.add(token_ids), len(token_ids)
        if logprobs:
            held = self._stop_strings.held
            text, self._known_chars = text + held, len(held)
            self._num_chars = len(text)
            self._shown_tokens.skip(self._num_chars)
        delta = TextDelta(self._choice, text, token_ids[:read], None)
        self._count(delta)
        return delta if self._parser is None else _with_parts(delta, [self._parser.add(text)])

    @property
    def reasoning_tokens(self) -> int:
        """How many of the choice's tokens so far are those with which the model thinks."""
        return 0 if self._reasoning is None else self._reasoning.count

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the choice, as far as that is known without the engine."""
        return self._stop_strings.found and not self._undecided

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the choice, if one has."""
        return self._stop_strings.found_string

    def add(self, output: RequestOutput) -> TextDelta:
        """Returns what ``output`` adds to the answer. Tokens after a stop string are not part of it.

        The delta's outcome is ``STOP`` also when a stop string was found and the engine is still at work on the choice.
        """
        delta = self._add(output)
        # A choice that is scores alone ends by its length, whatever the engine's token is.
        stopped = output.finish is FinishReason.STOP and delta.outcome is ChoiceOutcome.STOP
        if stopped and delta.stop_reason is None:
            last = output.new_token_ids[-1:] or self._last_resumed
            delta = msgspec.structs.replace(delta, end_token=last[0] if last else None)
        self._count(delta)
        return delta if self._parser is None else self._parsed(delta, self._parser)

    def _count(self, delta: TextDelta) -> None:
        if self._reasoning is not None:
            self._reasoning.add(delta.token_ids)

    def end_stopped(self) -> TextDelta:
        """Returns the last delta of a choice that tokens of another node have ended, with all their text."""
        delta = TextDelta(self._choice, "", (), ChoiceOutcome.STOP, stop_reason=self.stop_string)
        return delta if self._parser is None else self._parsed(delta, self._parser)

    def _add(self, output: RequestOutput) -> TextDelta:
        token_ids, finish, logprobs = output.new_token_ids, output.finish, output.logprobs
        if self._scores_only:
            outcome = None if finish is None else outcome_of(FinishReason.LENGTH if finish.is_answer else finish)
            return TextDelta(self._choice, "", (), outcome)
        if self._undecided:
            return TextDelta(self._choice, "", (), ChoiceOutcome.STOP, stop_reason=self._stop_reason(output))
        if finish is None and logprobs is None and not self._stop_strings.wanted:
            return TextDelta(self._choice, self._detokenizer.add(token_ids), token_ids, None)
        shown = self._shown(token_ids, finish)
        if self._stop_strings.wanted:
            text, read = self._until_stop(shown, logprobs)
            if self._stop_strings.found:
                token_ids = token_ids[:read]
        else:
            text = self._detokenize(shown, logprobs)
        if self._reports_end and logprobs is not None and not self._stop_strings.found:
            for token_id, own in zip(token_ids[len(shown) :], logprobs[len(shown) :], strict=False):
                self._shown_tokens.add(token_id, own, "")
        last = finish is not None and (finish.is_answer or not self._resumable)
        if last and not self._stop_strings.found:
            text += self._rest()
        over = last or self._stop_strings.found
        outcome = ChoiceOutcome.STOP if self._stop_strings.found else outcome_of(finish) if finish else None
        reason = self._stop_reason(output) if over else None
        if over and self._resumed and not output.new_token_ids:
            # The tokens that the client has end the answer: the last text was shown with them.
            return TextDelta(self._choice, "", (), outcome, stop_reason=reason)
        if over or logprobs is not None:
            return self._reported(text, token_ids, outcome, over=over, reason=reason)
        return TextDelta(self._choice, text, token_ids, outcome)

    def break_off(self) -> TextDelta:
        """Returns the text that was held back, for an answer that will not be complete."""
        if self._resumable:
            return TextDelta(self._choice, "", (), None)
        delta = self._reported(self._rest(), (), None, over=True)
        if self._parser is None:
            return delta
        parts = [*self._read(delta, self._parser), rest := self._parser.finish()]
        self._parsed_tokens.shown(rest)
        return _with_parts(self._with_parsed_tokens(delta), parts)

    def _parsed(self, delta: TextDelta, parser: MessageParser) -> TextDelta:
        """Returns ``delta`` with its text taken apart. Its last text also shows what was held back."""
        parts, outcome = self._read(delta, parser), delta.outcome
        if outcome is not None and (outcome.is_answer or not self._resumable):
            rest = parser.finish()
            # A resumed choice that ends without a token has shown all of its text with the tokens that end it.
            if not self._resumed or delta.token_ids:
                self._parsed_tokens.shown(rest)
                parts.append(rest)
        if outcome is ChoiceOutcome.STOP and parser.called:
            delta = msgspec.structs.replace(delta, outcome=ChoiceOutcome.TOOL_CALLS)
        return _with_parts(self._with_parsed_tokens(delta), parts)

    def _read(self, delta: TextDelta, parser: MessageParser) -> list[MessageParts]:
        """Returns what ``parser`` shows of the text of ``delta``."""
        if not delta.tokens:
            return [parser.add(delta.text)]
        # Log probabilities are sorted by the kind of text that their tokens make.
        pieces = cut_at_tokens(delta.text, self._num_chars - len(delta.text), delta.tokens)
        return [self._parsed_tokens.read(piece, parser) for piece in pieces]

    def _with_parsed_tokens(self, delta: TextDelta) -> TextDelta:
        taken, runs = self._parsed_tokens.take()
        if not (taken or delta.tokens):
            return delta
        return msgspec.structs.replace(delta, parsed_tokens=taken, parsed_runs=runs)

    def _stop_reason(self, output: RequestOutput) -> StopReason:
        last, stopped = output.new_token_ids[-1:] or self._last_resumed, output.finish is FinishReason.STOP
        stop_string = self.stop_string
        if stopped and not output.new_token_ids and not self._shown_stop_ids.issuperset(last):
            # The last token was read as if its text were part of the answer.
            stop_string = self._stop_before
        if stop_string is not None:
            return stop_string
        return last[0] if stopped and last and last[0] in self._stop_ids else None

    def _may_be_unshown(self, last: Sequence[int]) -> bool:
        """Returns whether the one token in ``last`` may be a stop token without text."""
        return any(
            token_id not in self._shown_stop_ids and (token_id in self._stop_ids or token_id in self._special_ids)
            for token_id in last
        )

    def _stop_at_end(self) -> str | None:
        """Returns the stop string that ends the choice if no more text follows."""
        return self._stop_strings.at_end(self._detokenizer.flush(), may_end=self._num_tokens > self._min_tokens)

    def _until_stop(self, token_ids: Sequence[int], logprobs: list[TokenLogprobs] | None) -> tuple[str, int]:
        """Returns the text up to the first stop string, and how many tokens it is made of.

        It takes the tokens one by one, so that the answer does not depend on how many of them come at once.
        """
        text = ""
        for index, token_id in enumerate(token_ids):
            piece = self._detokenize([token_id], None if logprobs is None else logprobs[index : index + 1])
            text += self._stop_strings.add(piece, may_end=self._num_tokens >= self._min_tokens)
            self._num_tokens += 1
            if self._stop_strings.found:
                return text, index + 1
        return text, len(token_ids)

    def _rest(self) -> str:
        may_end = self._num_tokens > self._min_tokens
        return self._stop_strings.add(self._detokenizer.flush(), may_end=may_end) + self._stop_strings.flush()

    def _reported(
        self,
        text: str,
        token_ids: Sequence[int],
        outcome: ChoiceOutcome | None,
        *,
        over: bool,
        reason: StopReason = None,
    ) -> TextDelta:
        """Returns the delta with the log probabilities of the tokens whose text is complete; at the end, of all tokens.

        Where the choice is resumable, it has these tokens and their text alone. Another node that resumes the choice
        gets log probabilities of no tokens but those that it generates.
        """
        known = min(self._known_chars, len(text))
        self._known_chars -= known
        text, token_ids = self._held_text + text[known:], [*self._held_ids, *token_ids]
        end = self._num_chars + len(text)
        tokens = self._shown_tokens.take(end)
        if over:
            tokens += self._shown_tokens.take_last(end, cut=self._stop_strings.found)
        if over or not self._resumable:
            chars, count = len(text), len(token_ids)
        else:
            chars, count = self._shown_tokens.taken_chars - self._num_chars, len(tokens)
        self._num_chars += chars
        self._held_text, self._held_ids = text[chars:], token_ids[count:]
        return TextDelta(self._choice, text[:chars], token_ids[:count], outcome, tokens, reason)

    def _detokenize(self, token_ids: Sequence[int], logprobs: list[TokenLogprobs] | None) -> str:
        if logprobs is None:
            return self._detokenizer.add(token_ids)
        pieces = []
        # One more log probability than tokens, where the last token is not shown.
        for token_id, own in zip(token_ids, logprobs, strict=False):
            piece = self._detokenizer.add((token_id,))
            self._shown_tokens.add(token_id, own, piece)
            pieces.append(piece)
        return "".join(pieces)

    def _shown(self, token_ids: list[int], finish: FinishReason | None) -> list[int]:
        if finish is FinishReason.STOP and token_ids and token_ids[-1] not in self._shown_stop_ids:
            return token_ids[:-1]
        return token_ids


class TextGeneration:
    """The texts of one client request, which must call ``close`` on every path, and may call it again."""

    def __init__(
        self,
        generation: Generation,
        choices: Mapping[int, ChoiceText],
        record: RequestRecord,
        metrics: RequestMetrics,
        unshown: Mapping[int, JournaledChoice] = MappingProxyType({}),
        repeated: Mapping[int, Sequence[int]] = MappingProxyType({}),
        reasoning_before: int = 0,
    ) -> None:
        """``choices`` has the choices by their numbers, those that are over for the client left out.

        One that a stop string has ended already, with tokens from another node, ends without the engine. ``unshown``
        are tokens of choices from other nodes that the client has not seen: the first delta of such a choice shows
        them, with what the engine adds. ``repeated`` are tokens from other nodes too: the first delta of such a choice
        has them alone, with the end of the choice if they are its last ones. ``reasoning_before`` is how many tokens
        of reasoning the choices have that are over for the client.
        """
        self._reasoning_before = reasoning_before
        self._repeated = dict(repeated)
        self._generation = generation
        self._unshown = dict(unshown)
        self._read: dict[int, list[TextDelta]] = {}
        """What was read of tokens that are ``unshown``, by choices whose next delta begins with it."""
        self._choices = dict(choices)
        self._texts = tuple(choices.values())
        self._stopped = [number for number, choice in choices.items() if choice.stopped]
        self._last_token: dict[int, float] = {}
        self._tokens: Counter[int] = Counter()
        """The tokens that this node has generated, by choice."""
        self._record = record
        self._metrics = metrics
        self._closed = False
        self.failure: RequestError | None = None
        """The reason why there will be no answer, as soon as that is known."""

    @property
    def done(self) -> bool:
        """Whether every choice is over."""
        return not self._choices

    @property
    def node_failed(self) -> bool:
        """Whether there will be no answer because of this node, and not because of the request."""
        return self._generation.failure is not None

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens of the complete answer so far are those with which the model thinks."""
        return self._reasoning_before + sum(text.reasoning_tokens for text in self._texts)

    @property
    def record(self) -> RequestRecord:
        return self._record

    async def next(self, within_s: float | None = None) -> list[TextDelta]:
        """Returns what the steps since the last call have added, after ``within_s`` also if that is nothing.

        Raises ``failure`` after all text before it.
        """
        if self.failure is not None:
            raise self.failure
        deltas = self._end_stopped() if self._stopped else []
        if self.done:
            return deltas
        items = await self._generation.wait(within_s)
        if self._unshown:
            for item in items:
                await self._read_unshown(item)
        if self._repeated:
            items = [part for item in items for part in self._repeat(item)]
        now = time.monotonic()
        deltas += [delta for item in items if (delta := self._take(item, now)) is not None]
        return deltas if self.failure is None else deltas + self._held()

    def on_move_wanted(self, callback: Callable[[int], object] | None) -> None:
        """Does what ``Generation.on_move_wanted`` does."""
        self._generation.on_move_wanted(callback)

    def take_move(self) -> int:
        """Does what ``Generation.take_move`` does."""
        return self._generation.take_move()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._generation.close()
        for choice in list(self._choices):
            self._end_choice(choice, ChoiceOutcome.ABORT, None)
        now = time.monotonic()
        self._metrics.request_ended(self._record, max(self._tokens.values(), default=0), now)
        log_request(self._record, now)
        keep_part(self._record, now)

    def _end_stopped(self) -> list[TextDelta]:
        stopped, self._stopped = self._stopped, []
        deltas = [self._choices[number].end_stopped() for number in stopped]
        for delta in deltas:
            self._end_choice(delta.choice, delta.outcome or ChoiceOutcome.STOP, None)
        return deltas

    def _take(self, item: ChoiceOutput, now: float) -> TextDelta | None:
        choice = self._choices.get(item.choice)
        if choice is None:
            return None
        if self._unshown or self._read:
            delta, count = self._add_to_unshown(choice, item)
        else:
            delta = choice.add(item.output)
            count = len(delta.token_ids)
        if item.output.prompt_logprobs is not None:
            delta = msgspec.structs.replace(delta, prompt_logprobs=item.output.prompt_logprobs)
        if count > 0:
            self._time_tokens(item.choice, count, now)
        if delta.outcome is not None:
            self._end(item, delta.outcome)
        return delta

    async def _read_unshown(self, item: ChoiceOutput) -> None:
        """Reads all but the last of a choice's unshown tokens. Others have their turns meanwhile: there may be many."""
        choice, known = self._choices.get(item.choice), self._unshown.get(item.choice)
        if choice is None or known is None:
            return
        while len(known.token_ids) > TURN_TOKENS and not choice.stopped:
            piece, known = known.split(TURN_TOKENS)
            output = RequestOutput(item.output.local_id, piece.token_ids, logprobs=piece.logprobs or None)
            delta = choice.add(output)
            self._read.setdefault(item.choice, []).append(delta)
            self._unshown[item.choice] = known
            await asyncio.sleep(0)

    def _repeat(self, item: ChoiceOutput) -> tuple[ChoiceOutput, ...]:
        """Returns ``item`` with the tokens before it that its choice has to repeat, if it has any."""
        output, known = item.output, list(self._repeated.pop(item.choice, ()))
        if not known:
            return (item,)
        if output.finish is not None and output.finish.is_answer and not output.new_token_ids:
            return (ChoiceOutput(item.choice, msgspec.structs.replace(output, new_token_ids=known)),)
        return ChoiceOutput(item.choice, RequestOutput(output.local_id, known)), item

    def _add_to_unshown(self, choice: ChoiceText, item: ChoiceOutput) -> tuple[TextDelta, int]:
        """Returns a delta with the choice's unshown tokens and ``item``, and how many of its tokens are of ``item``."""
        known, deltas = self._unshown.pop(item.choice, JournaledChoice()), self._read.pop(item.choice, [])
        if not choice.stopped:
            output = item.output
            if known.token_ids:
                output = msgspec.structs.replace(
                    output,
                    new_token_ids=known.token_ids + output.new_token_ids,
                    logprobs=(known.logprobs + (output.logprobs or [])) or None,
                )
            deltas.append(choice.add(output))
            count = len(deltas[-1].token_ids) - len(known.token_ids)
        else:
            count = 0
        return (deltas[0] if len(deltas) == 1 else _joined(deltas)), count

    def _end(self, item: ChoiceOutput, outcome: ChoiceOutcome) -> None:
        if item.output.finish is None:
            self._generation.end_choice(item.choice)
        self._end_choice(item.choice, outcome, item.output.report)
        if not outcome.is_answer and self.failure is None:
            self.failure = self._generation.failure or failure_of(item.output)
            self._generation.close()

    def _held(self) -> list[TextDelta]:
        """Returns what the choices that end with another one's failure have not shown yet."""
        return [delta for choice in self._choices.values() if (delta := choice.break_off()).shows]

    def _time_tokens(self, choice: int, count: int, now: float) -> None:
        record = self._record
        last = self._last_token.get(choice)
        if last is not None:
            self._metrics.next_tokens(now - last, count)
            if record.notes is not None:
                record.notes.gaps.note(now - last, now)
        elif record.first_token is None:
            record.first_token = now
            if record.resumed_tokens is None:
                self._metrics.first_token(now - record.arrived)
        self._last_token[choice] = record.last_token = now
        self._tokens[choice] += count
        record.output_tokens += count

    def _end_choice(self, choice: int, outcome: ChoiceOutcome, report: RequestReport | None) -> None:
        del self._choices[choice]
        self._record.outcomes.append(outcome)
        if report is not None:
            self._record.reports.append(report)
        self._metrics.choice_ended(outcome, report, self._tokens[choice])


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """Returns the deltas of one choice, of which the last may end it, as one."""
    whole = msgspec.structs.replace(
        deltas[-1],
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        tokens=[token for delta in deltas for token in delta.tokens],
        parsed_tokens=_joined_tokens(deltas),
        parsed_runs=[count for delta in deltas for count in delta.parsed_runs],
    )
    return _with_parts(whole, [parts_of(delta) for delta in deltas])


def _joined_tokens(deltas: Sequence[TextDelta]) -> Sequence[ShownToken] | None:
    if all(delta.parsed_tokens is None for delta in deltas):
        return None
    return [token for delta in deltas for token in delta.text_tokens]


def _with_parts(delta: TextDelta, parts: Sequence[MessageParts]) -> TextDelta:
    """Returns ``delta`` with ``parts`` as all that it shows."""
    whole = parts[0] if len(parts) == 1 else joined(parts)
    return msgspec.structs.replace(
        delta, text=whole.content, reasoning=whole.reasoning, calls=whole.calls, order=whole.order
    )


def parts_of(delta: TextDelta) -> MessageParts:
    """Returns what ``delta`` shows."""
    return MessageParts(delta.text, delta.reasoning, delta.calls, delta.order)
