"""The transfer thread, through which an engine transfers KV blocks without sockets or UCX of its own.

The thread runs both sides of an engine's transfers (``BothSides``): what it fetches from other engines, and what they
fetch from it. The two sides share the thread and the channels to the other TP ranks, and nothing else. Two engines that
fetch from each other have two control connections, two handshakes and two links, one for each direction. A link has a
UCX worker of its own, and its tags are looked up among the transfers of that link alone, so tags, notices and cells of
mapped memory cannot meet those of the other direction.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

import zmq

from pdserve.control.frame import Purpose, Sealer, Secrets
from pdserve.errors import RankLost, TransferError
from pdserve.liveness import SHOWN_EVERY_MS, LifeSign, unseen_sign
from pdserve.process import share_interpreter
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import BLOCK_HASH_BYTES, MAX_HASHES, UNKNOWN_LOAD, EngineSpec, FailureCause, PrefillLoad
from pdserve_kvtransfer.control.sockets import loopback_only
from pdserve_kvtransfer.events import (
    CachedFetchOrder,
    EventQueue,
    FetchOrder,
    TransferEvent,
    TransferStats,
    TransferThreadDied,
)
from pdserve_kvtransfer.fetch.side import FetchSide
from pdserve_kvtransfer.pieces import heads_of
from pdserve_kvtransfer.push.side import PushSide
from pdserve_kvtransfer.ranks import RankChannels
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.sides import (
    AcceptBlocks,
    CancelFetch,
    FailPush,
    GiveFirstToken,
    GiveHeld,
    LocalEngine,
    MeetPeers,
    OfferBlocks,
    Pollable,
    PushBlocks,
    Side,
    SideSettings,
    TransferCommand,
    earliest,
    wanted_groups,
)
from pdserve_kvtransfer.transport import BusyPoll, StepUnderWay, Transport

log = logging.getLogger(__name__)


class BothSides:
    """All transfers of one engine. It is a ``sides.Side``.

    The constructor raises TransferError if the control channel cannot be bound.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._ranks = engine.ranks
        self._push = PushSide(engine)
        self._fetch = FetchSide(engine, self._push.address)

    @property
    def address(self) -> str:
        """The address of the control channel, at which other engines fetch from this one."""
        return self._push.address

    def handle(self, command: TransferCommand, now: float) -> None:
        match command:
            case FetchOrder() | CachedFetchOrder() | AcceptBlocks() | CancelFetch() | OfferBlocks() | MeetPeers():
                self._fetch.handle(command, now)
            case PushBlocks() | GiveFirstToken() | GiveHeld() | FailPush():
                self._push.handle(command, now)

    def turn(self, now: float) -> bool:
        reported = self._ranks.receive()
        fetched = self._fetch.turn(now)
        pushed = self._push.turn(now)
        return reported or fetched or pushed

    def tick(self, now: float) -> None:
        self._fetch.tick(now)
        self._push.tick(now)

    def renew_leases(self, now: float) -> None:
        self._fetch.renew_leases(now)
        self._push.renew_leases(now)

    def next_timer(self) -> float | None:
        return earliest((self._fetch.next_timer(), self._push.next_timer()))

    def moving(self) -> bool:
        return self._fetch.moving() or self._push.moving()

    def arm(self) -> bool:
        return self._fetch.arm() and self._push.arm()

    def pollables(self) -> list[Pollable]:
        return [*self._ranks.sockets, *self._fetch.pollables(), *self._push.pollables()]

    def close(self, linger_s: float) -> None:
        with ExitStack() as stack:
            stack.callback(self._ranks.close, linger_s)
            stack.callback(self._push.close, linger_s)
            stack.callback(self._fetch.close, linger_s)


LINGER_S = 0.5
RANK_CHECK_S = 60.0


class TransferThread:
    """Owns all transfers of one engine: its fetches from any other engines, and its pushes to them.

    One other thread may call any method, and all but ``start`` and ``close`` return at once.

    The transfer thread calls ``wake`` after it has queued events; it must not block.
    ``transport`` makes the transport inside the thread.
    ``ranks`` has the addresses of the ``RankThread``s of this node's other ranks, in rank order.
    With ``reports_sent`` the engine gets ``BlocksSent``.
    ``life`` is where the thread shows life. ``step`` says when it has to leave the core to a step.
    Engines that fetch from this one are told its ``max_prompt_tokens``, or nothing if it is 0.
    The constructor raises ValueError if ``region`` and ``spec`` contradict each other.
    """

    def __init__(
        self,
        *,
        boot_id: bytes,
        secret: bytes | Secrets,
        spec: EngineSpec,
        region: KvRegion,
        settings: SideSettings,
        transport: Callable[[], Transport],
        wake: Callable[[], None],
        ranks: tuple[str, ...] = (),
        max_prompt_tokens: int = 0,
        reports_sent: bool = False,
        life: LifeSign | None = None,
        step: StepUnderWay | None = None,
    ) -> None:
        if region.num_groups != len(spec.group_heads):
            raise ValueError(f"the region has {region.num_groups} groups of blocks, and not {len(spec.group_heads)}")
        for group, heads in enumerate(spec.group_heads):
            if region.group_bytes(group) % len(heads_of(0, spec.tp_size, heads)):
                raise ValueError(f"a block of {region.group_bytes(group)} bytes is not a whole number of heads")
        self._boot_id = boot_id
        self._secret = secret
        self._spec = spec
        self._region = region
        self._settings = settings
        self._ranks = ranks
        self._max_prompt_tokens = max_prompt_tokens
        self._reports_sent = reports_sent
        self._life = unseen_sign() if life is None else life
        self._step = StepUnderWay() if step is None else step
        self._wake = wake
        self._make_transport = transport
        self._event_queue = EventQueue()
        self._stats = TransferStats()
        self._load = UNKNOWN_LOAD
        self._commands: deque[TransferCommand] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_lock = threading.Lock()
        self._closing = False
        self._close_by = math.inf
        self._started: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> str:
        """Starts the thread. Returns the engine's control address, ``tcp://host:port``, to be advertised.

        Raises TransferError if the control channel cannot be bound or UCX cannot start.
        """
        if not self._secret and not loopback_only(self._settings.host):
            raise TransferError(f"binding {self._settings.host} beyond this machine needs a cluster secret")
        share_interpreter()
        self._thread.start()
        return self._started.result()

    def fetch(self, order: FetchOrder | CachedFetchOrder) -> None:
        """Orders KV blocks. Raises ValueError if the order contradicts itself or is alive already."""
        if order.transfer_id.decode_boot != self._boot_id:
            raise ValueError("a transfer is named for the boot that fetches it")
        self._region.check(*order.block_ids)
        if isinstance(order, CachedFetchOrder):
            _check_hashes(order.hashes)
        groups = wanted_groups(self._spec, order)
        if not order.num_blocks or order.num_blocks != len(groups) or len(order.block_ids) > len(groups):
            raise ValueError(f"{order.num_blocks} destinations for {len(groups)} blocks")
        if self._spec.groups and any(map(self._is_other, order.block_ids, groups)):
            raise ValueError("a destination is of another cache group than its block")
        if len(set(order.block_ids)) != len(order.block_ids):
            raise ValueError("a block is a destination twice")
        self._event_queue.open(order.transfer_id)
        self._command(order)

    def _is_other(self, block_id: int, group: int) -> bool:
        return self._region.group_of(block_id) != group

    def offer(self, target: PrefillTarget, hashes: tuple[bytes, ...], request_id: str = "") -> None:
        """Tells ``target`` that this engine has the blocks with these hashes, which are a text's from the first one on.

        Nothing comes of an offer that cannot be delivered soon. Raises ValueError if there are no hashes, or too many.
        """
        _check_hashes(hashes)
        self._command(OfferBlocks(target, hashes, request_id))

    def meet(self, number: int, targets: tuple[PrefillTarget, ...]) -> None:
        """Connects to these engines before any fetch. ``PeersMet`` follows with ``number``, if no other call does."""
        self._command(MeetPeers(number, targets))

    def accept_blocks(self, transfer_id: TransferId, block_ids: tuple[int, ...]) -> None:
        """Gives destinations for the next coming blocks of a paced fetch. It is ignored if the fetch is over."""
        self._region.check(*block_ids)
        self._command(AcceptBlocks(transfer_id, block_ids))

    def cancel_fetch(self, transfer_id: TransferId) -> None:
        """Cancels a fetch, which then ends with ``FetchCancelled``. It is ignored if the fetch is over."""
        if self._event_queue.cancel(transfer_id):
            self._command(CancelFetch(transfer_id))

    def push(self, transfer_id: TransferId, first_block: int, block_ids: tuple[int, ...]) -> None:
        """Sends these final blocks, the wanted ones from number ``first_block`` on. It is ignored if the push is over.

        Raises ValueError if there is no such block.
        """
        self._region.check(*block_ids)
        self._command(PushBlocks(transfer_id, first_block, block_ids))

    def first_token(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        cached_tokens: int,
        load: PrefillLoad = UNKNOWN_LOAD,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """Gives a push its first token, after all its blocks. It is ignored if the push is over."""
        self._command(GiveFirstToken(transfer_id, tokens, cached_tokens, load, prompt_logprobs))

    def held(self, transfer_id: TransferId, count: int, usable: int = 0) -> None:
        """Answers ``CachedWanted``, after all blocks: the first ``count`` of the wanted ones are sent. It is ignored if
        the push is over. For ``usable`` see ``Held``.
        """
        self._command(GiveHeld(transfer_id, count, usable))

    def fail_push(self, transfer_id: TransferId, reason: str, cause: FailureCause = FailureCause.NODE) -> None:
        """Refuses a push or gives it up. ``PushEnded`` follows without ``PushCancelled``. It is ignored if the push is
        over.
        """
        self._command(FailPush(transfer_id, reason, cause))

    def tell_load(self, load: PrefillLoad) -> None:
        """Sets this engine's load, which engines that fetch from it hear with their next ping."""
        self._load = load

    def events(self) -> list[TransferEvent]:
        """Returns the events since the last call, oldest first."""
        return self._event_queue.drain()

    def stats(self) -> TransferStats:
        return self._stats.snapshot()

    @property
    def native_id(self) -> int:
        """The kernel's number of the thread, by which its CPU time is found; 0 before ``start``."""
        return self._thread.native_id or 0

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """Ends every transfer, tells the peers, and frees everything. Idempotent.

        Raises TransferError if the thread has not ended within ``timeout_s``.
        """
        self._close_by = time.monotonic() + timeout_s
        self._closing = True
        if self._thread.ident is not None:
            self._wake_thread()
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TransferError(f"the transfer thread did not end within {timeout_s} s")
        with self._wakeup_lock:
            if self._wakeup >= 0:
                os.close(self._wakeup)
                self._wakeup = -1

    def _command(self, command: TransferCommand) -> None:
        self._commands.append(command)
        self._wake_thread()

    def _wake_thread(self) -> None:
        with self._wakeup_lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._serve(context)
        except (TransferError, RankLost) as exc:
            self._report_death(exc)
        except Exception as exc:
            log.exception("the transfer thread died")
            self._report_death(exc)
        finally:
            context.term()

    def _report_death(self, exc: Exception) -> None:
        if self._started.done():
            self._event_queue.put(TransferThreadDied(f"{type(exc).__name__}: {exc}"))
            self._wake()
        else:
            self._started.set_exception(exc)

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        transport = self._make_transport()
        transport.step = self._step
        try:
            sides = self._open_sides(transport, context)
            try:
                with self._life.shown_by_this_thread():
                    self._loop(sides)
            finally:
                sides.close(max(0.0, min(LINGER_S, self._close_by - time.monotonic())))
                self._wake_engine()
        finally:
            transport.close()

    def _open_sides(self, transport: Transport, context: zmq.Context[zmq.Socket[bytes]]) -> BothSides:
        ranks = RankChannels(context, self._ranks)
        try:
            ranks.check_ranks(RANK_CHECK_S)
            sides = BothSides(self._local_engine(transport, context, ranks))
        except BaseException:
            ranks.close(0.0)
            raise
        self._started.set_result(sides.address)
        return sides

    def _local_engine(
        self, transport: Transport, context: zmq.Context[zmq.Socket[bytes]], ranks: RankChannels
    ) -> LocalEngine:
        return LocalEngine(
            boot_id=self._boot_id,
            secret=self._secret,
            spec=self._spec,
            region=self._region,
            settings=self._settings,
            transport=transport,
            zmq_context=context,
            sealer=Sealer(self._secret, Purpose.TRANSFER, self._boot_id),
            ranks=ranks,
            event_queue=self._event_queue,
            stats=self._stats,
            load=lambda: self._load,
            max_prompt_tokens=self._max_prompt_tokens,
            reports_sent=self._reports_sent,
        )

    def _loop(self, sides: Side) -> None:
        expected = math.inf
        busy_poll = BusyPoll(self._step)
        while not self._closing:
            now = time.monotonic()
            self._life.show()
            if now > expected + self._settings.lease_s / 2:
                sides.renew_leases(now)
            while self._commands:
                sides.handle(self._commands.popleft(), now)
            moved = sides.turn(now)
            sides.tick(now)
            self._wake_engine()
            expected = now if busy_poll.again(moved, sides.moving(), now) else self._wait(sides, now)

    def _wake_engine(self) -> None:
        if self._event_queue.take_news():
            self._wake()

    def _wait(self, sides: Side, now: float) -> float:
        """Sleeps until there is news or a timer is due. Returns when the sleep should have ended at the latest."""
        if not sides.arm():
            return now
        timer = sides.next_timer()
        until_ms = SHOWN_EVERY_MS if timer is None else max(0, math.ceil((timer - now) * 1000))
        poller = zmq.Poller()
        for pollable in (self._wakeup, *sides.pollables()):
            poller.register(pollable, zmq.POLLIN)
        ready = dict(poller.poll(min(until_ms, SHOWN_EVERY_MS)))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        return math.inf if timer is None else max(now, timer)


def _check_hashes(hashes: tuple[bytes, ...]) -> None:
    if not 0 < len(hashes) <= MAX_HASHES:
        raise ValueError(f"{len(hashes)} hashes, which are 1 to {MAX_HASHES}")
    if any(len(block_hash) != BLOCK_HASH_BYTES for block_hash in hashes):
        raise ValueError(f"a hash does not have {BLOCK_HASH_BYTES} bytes")
