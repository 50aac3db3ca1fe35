"""Moves the answers of nodes that drain, or run out of blocks, to other nodes, while the old ones go on with them.

    waiting ──a node, a turn──▶ preparing ──prepared──▶ cutting over ──its first events──▶ moved
       ▲                            │                        └──it declines──▶ another node, as after a loss
       ├────────declines────────────┤
       │                            └──a second node is lost, or an answer that is unfit──▶ stays: it ends where it is
       └── at any time: its end, or the client leaves ──▶ ended

The new node is asked to prepare first: it fetches the KV cache from the old node and from other holders. When the next
block of a stream is full, it is asked once more, which takes it little time (``FullBlockWatch``). Then the old node's
response is closed behind an event, and the new node gets the journal as it is now. It lacks a few tokens then. The
bytes of two nodes never reach a client together: there is one response that is read, and the next one is asked for when
it is closed. While no other node has a free place, the answer goes on where it is.

A node that runs out of blocks names an answer that should go on where there are more, before it has to preempt it
(``RelayJournal.on_blocks_wanted``). There is one attempt at that, at a node that has them now. If it fails, nothing has
changed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from pdserve.config import RelayConfig
from pdserve.control.journal import Journal, JournalError
from pdserve.errors import Unavailable
from pdserve.patience import PatientTimeout
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.terms import MAX_PREPARED_BYTES, Prepared, decode_prepared
from pdserve_proxy.continuation.resume import (
    NEXT_EVENT_S,
    NO_WORK,
    Declined,
    LostStream,
    ResumeFailed,
    Resumes,
    Resumption,
)
from pdserve_proxy.records.access_log import RequestCounts
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.dispatch import REFUSALS, Dispatch
from pdserve_proxy.relay.outcomes import MoveOutcome, MoveReason
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.routing.router import RETRY_AFTER_S, Route
from pdserve_proxy.upstream.node_connection import NodeLost, NodeResponse, NodeUnreachable

log = logging.getLogger(__name__)

PREPARE_S = 10.0
"""Seconds that a node has to fetch what it can of an answer's KV cache."""
FULL_BLOCK_S = 4.0
"""Seconds that an answer may take to fill the block that it is at, before it is cut within that."""
MAX_LATER_BYTES = 2**15
"""Entries are read within the event loop. Where more than this has come, the node prepares once more without a look."""
CUT_OVER_S = 10.0
"""Seconds for which an answer keeps its turn when its node is prepared. A client that reads slowly may take longer."""
LOAD_SHOWS_S = 2.0
"""After so long a node's load, which it tells every second, has the blocks of an answer that has moved there."""
LOOK_S = 0.1
"""Seconds until an answer of which nothing has come yet is looked at again."""
MAX_LOSSES = 2
"""The nodes that may be lost while they prepare for one answer: it may be what they die of."""
MAX_MOVES_FOR_BLOCKS = 2
"""How often one answer leaves a node for want of blocks: where all nodes are short of them, it would only go around."""
OF_THE_NODE = (*REFUSALS, 408, 413)
"""Status codes below 500 that are no word about the answer: another node may prepare for it."""


FEW_TOKENS = 4
"""So many tokens of a choice are replayed in little more time than a step takes that computes one."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """An answer cannot move at all."""

    why: str


@dataclass(frozen=True, slots=True)
class PreparedNode:
    """A node has prepared for an answer."""

    prepared: Prepared
    entries_bytes: int
    """The size of the journal's entries that the node had for that."""


@dataclass(frozen=True, slots=True)
class Move:
    """An answer's way from its node to another one."""

    task: asyncio.Task[None]
    old: NodeInfo
    reason: MoveReason


class PlannedMoves:
    """Moves the answers of one proxy process, so many at a time. The owner has to call ``close`` in the end."""

    def __init__(
        self, config: RelayConfig, registry: RegistryView, dispatch: Dispatch, resumes: Resumes, counts: RequestCounts
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._registry = registry
        self._dispatch = dispatch
        self._resumes = resumes
        self._counts = counts
        self._turns = asyncio.Semaphore(config.max_moves)
        self._answers: dict[RelayedRequest, Resumption] = {}
        """The answers that can be resumed."""
        self._moves: dict[RelayedRequest, Move] = {}
        """The moves, those of answers that stay where they are included."""
        registry.on_change(self._look)

    def close(self) -> None:
        for move in self._moves.values():
            move.task.cancel()

    def watch(self, relayed: RelayedRequest, resumption: Resumption) -> None:
        """From now on moves the answer whenever its node drains or lacks blocks, until ``ended`` is called."""
        self._answers[relayed] = resumption
        if resumption.journal is not None:
            resumption.journal.on_blocks_wanted = lambda tokens: self._want_blocks(relayed, resumption, tokens)
        self._look_at(relayed, resumption)

    def ended(self, relayed: RelayedRequest) -> None:
        """Ends what goes on for the answer. It may be one that is not watched."""
        if self._answers.pop(relayed, None) is None:
            return
        move = self._moves.pop(relayed, None)
        if move is not None and not move.task.done():
            move.task.cancel()
            if relayed.route is not None and relayed.route.decode is move.old:
                self._counts.move_ended(move.reason, MoveOutcome.ENDED)

    def _look(self) -> None:
        """Begins to move the answers of the nodes that drain."""
        if self._registry.draining:
            for relayed, resumption in self._answers.items():
                self._look_at(relayed, resumption)

    def _look_at(self, relayed: RelayedRequest, resumption: Resumption) -> None:
        if relayed.route is None or resumption.planned:
            return
        old, move = relayed.route.decode, self._moves.get(relayed)
        if move is not None and (move.old is old or not move.task.done()):
            return
        if old.boot_id in self._registry.draining:
            task = asyncio.create_task(self._move(relayed, resumption, old), name="move")
            self._moves[relayed] = Move(task, old, MoveReason.DRAIN)

    def _want_blocks(self, relayed: RelayedRequest, resumption: Resumption, tokens: int) -> None:
        """Begins to move an answer to a node with free blocks for so many tokens, if it does not move already."""
        if relayed.route is None or relayed not in self._answers or resumption.planned:
            return
        old, move = relayed.route.decode, self._moves.get(relayed)
        if old.boot_id in self._registry.draining or (move is not None and not move.task.done()):
            return
        task = asyncio.create_task(self._move_for_blocks(relayed, resumption, old, tokens), name="move for blocks")
        self._moves[relayed] = Move(task, old, MoveReason.BLOCKS)

    async def _move(self, relayed: RelayedRequest, resumption: Resumption, old: NodeInfo) -> None:
        try:
            result = await self._leave(relayed, resumption, old)
        except Exception:
            log.exception("request_id=%s a move failed inside the proxy", relayed.request_id)
            result = Unfit("the proxy failed")
        if result is None or not resumption.is_at(old):  # so that it can move again
            self._moves.pop(relayed, None)
            return
        self._counts.move_ended(MoveReason.DRAIN, MoveOutcome.STAYED)
        log.warning("request_id=%s stays at %s: %s", relayed.request_id, relayed.decode_name, result.why)

    async def _move_for_blocks(
        self, relayed: RelayedRequest, resumption: Resumption, old: NodeInfo, tokens: int
    ) -> None:
        try:
            result = await self._leave_for_blocks(resumption, old, tokens)
        except Exception:
            log.exception("request_id=%s a move failed inside the proxy", relayed.request_id)
            result = Unfit("the proxy failed")
        if result is not None and resumption.is_at(old):
            self._counts.move_ended(MoveReason.BLOCKS, MoveOutcome.STAYED)
            # Where all nodes are short of blocks, there may be many such lines. A node that was asked is rare.
            level = logging.INFO if isinstance(result, Declined) else logging.DEBUG
            log.log(level, "request_id=%s stays at %s: %s", relayed.request_id, old.name, result.why)
        self._moves.pop(relayed, None)
        if relayed in self._answers:
            self._look_at(relayed, resumption)  # its node may drain by now

    async def _leave_for_blocks(self, resumption: Resumption, old: NodeInfo, tokens: int) -> Unfit | Declined | None:
        """Returns when the answer is elsewhere, or why it stays at its ``old`` node. It waits for no node."""
        if resumption.moves_for_blocks >= MAX_MOVES_FOR_BLOCKS:
            return Unfit(f"it has moved for want of blocks {MAX_MOVES_FOR_BLOCKS} times already")
        stream = resumption.leaving()
        if stream is None:
            return Unfit("there is no complete journal of it")
        stream = replace(stream, needs_tokens=tokens)
        route = self._resumes.choose(stream, {old.boot_id: math.inf})
        if route is None:
            return Unfit("no other node has enough free blocks")
        if self._turns.locked():
            return Unfit("other answers move now")
        log.info(
            "request_id=%s is to leave %s for want of blocks: to=%s tokens=%d",
            stream.relayed.request_id,
            old.name,
            route.decode.name,
            tokens,
        )
        with ExitStack() as expected:
            have_come = self._dispatch.expect_tokens(tokens, route.decode)
            expected.callback(self._loop.call_later, LOAD_SHOWS_S, have_come)
            async with self._turns:
                attempt = self._dispatch.expect(stream.request.body, route.decode)
                expected.callback(attempt.end_everywhere)
                prepared = await self._prepare(stream, route)
            if isinstance(prepared, PreparedNode) and not _has_blocks_of(prepared.prepared):
                return Declined(f"{route.decode.name} could not fetch its blocks")
            return await self._go(prepared, stream, route, resumption, old, MoveReason.BLOCKS)

    async def _leave(self, relayed: RelayedRequest, resumption: Resumption, old: NodeInfo) -> Unfit | None:
        """Returns when the answer is elsewhere, or why it stays at its ``old`` node."""
        losses, asked_again_s = 0, {old.boot_id: math.inf}
        until_s = self._loop.time() + relayed.remaining_s
        while resumption.is_at(old) and not resumption.planned:
            stream = resumption.leaving()
            if stream is None:
                if not resumption.may_be_resumable:
                    return Unfit("there is no complete journal of it")
                await asyncio.sleep(LOOK_S)
                continue
            try:
                await self._resumes.route(stream, asked_again_s, until_s)
            except ResumeFailed:
                return Unfit("no other node fits")
            with ExitStack() as expected:
                async with self._turns:
                    # What has come while it waited belongs to the journal.
                    route, stream = self._resumes.choose(stream, asked_again_s), resumption.leaving()
                    if route is None or stream is None:
                        continue
                    attempt = self._dispatch.expect(stream.request.body, route.decode)
                    expected.callback(attempt.end_everywhere)
                    prepared = await self._prepare(stream, route)
                declined = await self._go(prepared, stream, route, resumption, old)
            if not isinstance(declined, Declined):
                return declined
            node = route.decode
            asked_again_s[node.boot_id] = self._loop.time() + RETRY_AFTER_S
            log.info("request_id=%s decode=%s does not prepare: %s", relayed.request_id, node.name, declined.why)
            losses += declined.lost
            if losses == MAX_LOSSES:
                return Unfit("the nodes that were to go on with it were lost")
        return None

    async def _go(
        self,
        prepared: PreparedNode | Declined | Unfit,
        stream: LostStream,
        route: Route,
        resumption: Resumption,
        old: NodeInfo,
        reason: MoveReason = MoveReason.DRAIN,
    ) -> Declined | Unfit | None:
        """Moves the answer to the node of ``route``, which is ``prepared``. Returns why not, if it stays."""
        again = isinstance(prepared, PreparedNode) and await self._near_full_block(prepared, stream, resumption, old)
        async with self._turns:
            if again and resumption.is_at(old) and (later := resumption.leaving()) is not None:
                prepared = await self._prepare(later, route)
            if not isinstance(prepared, PreparedNode):
                return prepared
            if not resumption.is_at(old):  # it was lost meanwhile, and is resumed
                return None
            if not self._resumes.takes_work(stream.query, route.decode):
                return NO_WORK
            gone = resumption.move_to(route, reason)
            done, _ = await asyncio.wait([gone], timeout=CUT_OVER_S)
            return gone.result() if done else None

    async def _near_full_block(
        self, ready: PreparedNode, stream: LostStream, resumption: Resumption, old: NodeInfo
    ) -> bool:
        """Waits until a block has just become full, if that spares replaying much. Returns whether it does."""
        if not stream.request.body.stream:  # its client sees no pause
            return False
        until_s, watch, read = self._loop.time() + FULL_BLOCK_S, FullBlockWatch(ready.prepared), ready.entries_bytes
        while resumption.is_at(old) and self._loop.time() < until_s:
            size = len(stream.journal.entries)
            if size - read > MAX_LATER_BYTES:
                return True
            try:
                due = watch.show(stream.journal.read_from(read))
            except JournalError:
                return False
            if due is not False:
                return due is True
            read = size
            await stream.relayed.next_event(NEXT_EVENT_S)
        return False

    async def _prepare(self, stream: LostStream, route: Route) -> PreparedNode | Declined | Unfit:
        """Returns when the node of ``route`` can go on with the answer, or why it does not."""
        node, entries_bytes = route.decode, len(stream.journal.entries)
        try:
            async with PatientTimeout(PREPARE_S):
                response = await self._dispatch.post(
                    stream.relayed,
                    stream.request,
                    route,
                    stream.entries,
                    self._resumes.known(stream.holders, node),
                    prepare=True,
                )
                body = await _read_off(response)
        except NodeUnreachable as exc:
            self._registry.mark_unreachable(node.boot_id)
            return Declined(f"it cannot be reached: {exc}")
        except NodeLost as exc:
            return Declined(f"it was lost: {exc}", lost=True)
        except Unavailable as exc:  # which says nothing about the node
            return Declined(exc.message)
        except TimeoutError:
            return Declined(f"it did not answer within {PREPARE_S:g} s")
        if response.status == 200:
            return PreparedNode(decode_prepared(body), entries_bytes)
        why = f"it answered with status {response.status}"
        another_may = response.status in OF_THE_NODE or response.status >= 500
        return Declined(why) if another_may else Unfit(f"{node.name}: {why}")


def _has_blocks_of(prepared: Prepared) -> bool:
    """Returns whether the node has what can be had of an answer's blocks: all but the last two of each choice.

    The last one is not full, and the one before may have become full just now.
    """
    return max(prepared.lacking.values(), default=0) <= 2 * prepared.block_tokens


async def _read_off(response: NodeResponse) -> bytes:
    """Returns the beginning of the small body, and reads all of it, so that the connection can be kept.

    Raises NodeLost.
    """
    body = b""
    try:
        while not response.exhausted:
            body = (body + await response.read())[:MAX_PREPARED_BYTES]
    finally:
        response.close()
    return body


class FullBlockWatch:
    """Says when a block of an answer has just become full. It is shown every entry once, however many there are.

    A node that has prepared has all blocks that were full then. When the answer is cut, it replays the tokens behind
    them, each as a row of its own, and the client waits for that. So the old node goes on until a block has just become
    full, the new one prepares once more, and then comes the cut: only the tokens are left that came meanwhile.
    """

    def __init__(self, prepared: Prepared) -> None:
        """``prepared`` is what the new node has said."""
        self._prepared = prepared
        self._came: Counter[int] = Counter()
        self._wanted: int | None = None

    def show(self, later: Journal) -> bool | None:
        """Takes what came since the last call, at first since the node prepared.

        Returns whether the node should prepare once more now; None if it need not at all.
        """
        for number, choice in later.choices.items():
            self._came[number] += len(choice.token_ids)
        most = max(self._came.values(), default=0)
        if self._wanted is None:
            more = tokens_to_wait(lacking_now(self._prepared.lacking, later).values(), self._prepared)
            if more is None:
                return None
            self._wanted = most + more
        return most >= self._wanted


def lacking_now(lacking: Mapping[int, int], later: Journal) -> dict[int, int]:
    """Returns what a prepared node lacks of each choice that is not over, with the tokens that came ``later``."""
    over = {number for number, choice in later.choices.items() if choice.over}
    return {number: tokens + len(later.emitted(number)) for number, tokens in lacking.items() if number not in over}


def tokens_to_wait(lacking: Collection[int], prepared: Prepared) -> int | None:
    """Returns after how many more tokens of each choice the node should prepare once more; None if it need not.

    ``lacking`` is what it lacks of each choice now. Choices that have begun together become full together. Of others
    the best is taken: the sum of what they lack is the least.
    """
    block_tokens = prepared.block_tokens
    if max(lacking, default=0) <= FEW_TOKENS or block_tokens == 0:
        return None
    if max(prepared.lacking.values(), default=0) > block_tokens:
        # Its holders did not give it all full blocks: they would not do that the next time.
        return None

    def left_after(more: int) -> int:
        # A choice's last token is never in a block: its logits are what the next step is for.
        return sum((tokens + more - 1) % block_tokens for tokens in lacking)

    return min(range(block_tokens), key=left_after)
