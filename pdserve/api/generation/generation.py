"""Holds what the engine said about one client request until its reader takes it, and wakes the readers.

A ``Generation`` covers all engine requests of one client request.

``BatchNotify`` wakes the readers of a step's outputs in groups, with a turn of the event loop between groups. If all
were woken at once, a thousand readers would each put their text together before the first of their bytes leaves, and
before any other connection gets a turn. In groups the first one's bytes are on their way while the last one waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import msgspec

from pdserve.errors import RequestError
from pdserve.wire.engine import FinishReason, RequestOutput
from pdserve.wire.sampling_params import TokenLogprobs


class Wakeable(Protocol):
    """What waits for outputs of the engine."""

    def wake(self) -> None:
        """Tells it that it has something to read. It may have read that already."""


class BatchNotify:
    """Wakes readers in the order in which they were added: ``size`` in one turn of the running loop, or all if it is 0.

    It holds no outputs, so it cannot change their order. A reader takes all that has come until it is woken as one
    output.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._pending: dict[Wakeable, None] = {}
        self._scheduled = False

    def add(self, reader: Wakeable) -> None:
        """Lets ``notify`` wake this reader. Adding it twice before that changes nothing."""
        self._pending[reader] = None

    def notify(self) -> None:
        """Wakes the first group, unless one was woken in this turn already. The rest follows turn by turn."""
        if not self._size:
            pending, self._pending = self._pending, {}
            for reader in pending:
                reader.wake()
        elif not self._scheduled:
            self._wake_group()

    def _wake_group(self) -> None:
        group = list(self._pending) if len(self._pending) <= self._size else self._first()
        for reader in group:
            del self._pending[reader]
            reader.wake()
        self._scheduled = bool(group)
        if group:
            # Behind the group's own steps, which waking has just queued.
            self._loop.call_soon(self._wake_group)

    def _first(self) -> list[Wakeable]:
        return [reader for reader, _ in zip(self._pending, range(self._size), strict=False)]


DEADLINE_GRACE_S = 1.0
"""The engine ends a request at its deadline. If it does not, the API process does so this much later."""

TURN_TOKENS = 1_024
"""More tokens of one request are read in several turns of the event loop."""


@dataclass(frozen=True, slots=True)
class ReadPace:
    """How often the reader of a generation is woken, and how much it reads at once."""

    interval: int = 1
    """The reader is woken for so many tokens of a choice."""
    turn_tokens: int = TURN_TOKENS
    """How many tokens of all choices one ``wait`` returns. It may be up to a step's more."""


EACH_TOKEN = ReadPace()


class ChoiceOutput(msgspec.Struct, frozen=True, gc=False):
    """What the engine has added to one choice since it was last read."""

    choice: int
    output: RequestOutput


class UnreadOutputs:
    """The outputs of one choice that its reader has not taken. It knows whether they are enough to be read."""

    __slots__ = ("_due_at", "_interval", "_outputs", "_tokens", "choice")

    def __init__(self, choice: int, interval: int) -> None:
        self.choice = choice
        self._interval = interval
        self._due_at = 1
        """How many tokens are enough to be read. The first token is read at once."""
        self._tokens = 0
        self._outputs: list[RequestOutput] = []

    def put(self, output: RequestOutput) -> bool:
        """Keeps ``output``. Returns whether the choice is to be read now: it has enough tokens, or has ended."""
        self._outputs.append(output)
        self._tokens += len(output.new_token_ids)
        return self._tokens >= self._due_at or output.finish is not None or output.prompt_logprobs is not None

    @property
    def failed(self) -> bool:
        """Whether the choice has ended without an answer."""
        finish = self._outputs[-1].finish if self._outputs else None
        return finish is not None and not finish.is_answer

    @property
    def empty(self) -> bool:
        return not self._outputs

    def take(self, max_tokens: int) -> ChoiceOutput | None:
        """Returns the first outputs as one, up to the one that reaches ``max_tokens``, or None if there are none."""
        if self._tokens:
            self._due_at = self._interval
        outputs, self._outputs, self._tokens = self._first(max_tokens)
        if not outputs:
            return None
        return ChoiceOutput(self.choice, outputs[0] if len(outputs) == 1 else merge_outputs(outputs))

    def _first(self, max_tokens: int) -> tuple[list[RequestOutput], list[RequestOutput], int]:
        """Returns the outputs that ``take`` merges, the others, and how many tokens the others have."""
        if self._tokens <= max_tokens:
            return self._outputs, [], 0
        taken = 0
        for count, output in enumerate(self._outputs, 1):
            taken += len(output.new_token_ids)
            if taken >= max_tokens:
                return self._outputs[:count], self._outputs[count:], self._tokens - taken
        return self._outputs, [], 0


class Generation:
    """What the engine says about one client request. Its reader must ``close`` it on every path, which aborts what is
    unfinished.

    The reader is woken for the first token of a choice, for so many tokens of one as ``ReadPace`` says, and for an end.
    However much comes before it runs, it is woken once, and reads what came for one choice as one output. If that is so
    much that it would hold up other readers, it comes as several outputs, with a turn of the event loop between them.
    """

    def __init__(
        self,
        choices: Mapping[int, int],
        deadline_s: float,
        abort: Callable[[Sequence[int]], None],
        pace: ReadPace = EACH_TOKEN,
    ) -> None:
        """``choices`` has the number of each choice by the ``local_id`` of its engine request."""
        self._turn_tokens = pace.turn_tokens
        self._open = {local_id: UnreadOutputs(choice, pace.interval) for local_id, choice in choices.items()}
        self._abort = abort
        self.failure: RequestError | None = None
        """Why the whole generation failed. It is None where the engine said so of one request."""
        self._due: dict[int, UnreadOutputs] = {}
        """The choices that the reader is to take, by their index."""
        self._left_over = False
        """Whether the last ``wait`` did not return all that was due."""
        self._waiter: asyncio.Future[None] | None = None
        self._hurried = False
        """Whether ``wait`` returns without anything that is due."""
        self._move_tokens = 0
        """What the engine has last asked for, until somebody hears of it."""
        self._on_move_wanted: Callable[[int], object] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(deadline_s + DEADLINE_GRACE_S, self._expire)

    def put(self, output: RequestOutput) -> bool:
        """Keeps an output of one of this generation's requests. Returns whether the reader is to be woken for it.

        What comes for a choice that is over is ignored.
        """
        unread = self._open.get(output.local_id)
        if unread is None:
            return False
        due = unread.put(output)
        if due:
            self._due[unread.choice] = unread
        if output.finish is not None:
            del self._open[output.local_id]
            if not output.finish.is_answer:
                # The complete answer ends with it, and what the other choices have said is part of that.
                self._due.update((other.choice, other) for other in self._open.values())
        return due

    def want_move(self, tokens: int) -> None:
        """Notes that the engine would have the answer go on at a node with free blocks for so many tokens."""
        self._move_tokens = tokens
        self._tell_move()

    def on_move_wanted(self, callback: Callable[[int], object] | None) -> None:
        """From now on calls ``callback`` with the tokens for which the engine wants blocks elsewhere, each time.

        A wish that came before is passed on at once. Without a callback, wishes wait.
        """
        self._on_move_wanted = callback
        self._tell_move()

    def take_move(self) -> int:
        """Returns for how many tokens the engine wants blocks elsewhere, once for each wish; 0 if it has none."""
        tokens, self._move_tokens = self._move_tokens, 0
        return tokens

    def wake(self) -> None:
        """Wakes the reader if it waits and something is due."""
        if self._due and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def deliver(self, output: RequestOutput) -> None:
        """Does ``put``, and then ``wake`` if that is due."""
        if self.put(output):
            self.wake()

    async def wait(self, within_s: float | None = None) -> list[ChoiceOutput]:
        """Returns what is due, at least one output, and at the latest when the deadline has passed.

        After ``within_s`` it returns what there is, due or not, and be it nothing. It must not be called when all
        choices are over and read.
        """
        if not self._due:
            timer = None if within_s is None else self._loop.call_later(within_s, self._hurry)
            try:
                await self._until_due()
            finally:
                self._hurried = False
                if timer is not None:
                    timer.cancel()
        if self._left_over:
            await asyncio.sleep(0)
        if len(self._due) == 1:
            # As nearly always: most answers have one choice.
            ((choice, unread),) = self._due.items()
            item = unread.take(self._turn_tokens)
            self._left_over = not unread.empty
            if not self._left_over:
                del self._due[choice]
            return [] if item is None else [item]
        items, left = [], self._turn_tokens
        # A failure ends all choices of the answer, after all that the other choices have said.
        for unread in sorted(self._due.values(), key=attrgetter("failed")):
            if left <= 0:
                break
            item = unread.take(left)
            if unread.empty:
                del self._due[unread.choice]
            if item is not None:
                items.append(item)
                left -= len(item.output.new_token_ids)
        self._left_over = bool(self._due)
        return items

    def end_choice(self, choice: int) -> None:
        """Lets the engine forget a choice of which the reader needs no more."""
        self._end([local_id for local_id, unread in self._open.items() if unread.choice == choice])

    def fail(self, failure: RequestError) -> None:
        """Ends every open choice with ``FinishReason.ERROR``. The client gets ``failure``."""
        self.failure = failure
        for local_id in list(self._open):
            self.deliver(RequestOutput(local_id, [], FinishReason.ERROR, None, failure.message))

    def close(self) -> None:
        """Aborts what is unfinished. It may be called again."""
        self._timer.cancel()
        self._on_move_wanted = None
        self._end(list(self._open))

    async def _until_due(self) -> None:
        while not (self._due or self._hurried):
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _tell_move(self) -> None:
        if self._on_move_wanted is not None and self._move_tokens:
            self._on_move_wanted(self.take_move())

    def _hurry(self) -> None:
        """Makes all that has come due, and wakes the reader."""
        self._due.update((unread.choice, unread) for unread in self._open.values() if not unread.empty)
        self._hurried = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        open_ids = list(self._open)
        for local_id in open_ids:
            self.deliver(RequestOutput(local_id, [], FinishReason.DEADLINE))
        self._abort(open_ids)

    def _end(self, local_ids: list[int]) -> None:
        for local_id in local_ids:
            del self._open[local_id]
        if local_ids:
            self._abort(local_ids)


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Returns consecutive outputs of one request as one. Only the last of them may have an end."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for output in outputs:
        token_ids += output.new_token_ids
        logprobs += output.logprobs or ()
    last = outputs[-1]
    prompt_logprobs = next((output.prompt_logprobs for output in outputs if output.prompt_logprobs), None)
    return RequestOutput(
        last.local_id, token_ids, last.finish, last.report, last.error, logprobs or None, prompt_logprobs
    )
