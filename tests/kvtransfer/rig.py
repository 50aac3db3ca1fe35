"""Engines without a model, which have a transfer thread, some memory, and the thread's events."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

from pdserve.config import TransferConfig, UcxCalls
from pdserve.control.frame import Secrets
from pdserve.settings import cache_folder
from pdserve.wire.cache_groups import GroupBlocks
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
from pdserve_kvtransfer.configuration import chosen_poster, configured_ucx, side_settings
from pdserve_kvtransfer.events import FetchOrder, TransferEvent
from pdserve_kvtransfer.region import KvRegion, Memory, SharedMemory
from pdserve_kvtransfer.thread import TransferThread
from pdserve_kvtransfer.transport import StepUnderWay, Transport
from pdserve_kvtransfer.ucx.ucx_transport import MakePoster

SECRET = b"the secret of a test cluster"
SPEC = EngineSpec(
    protocol=PROTOCOL_VERSION,
    oldest_protocol=OLDEST_PROTOCOL,
    fingerprint="model-a",
    dtype="bf16",
    block_size=16,
    num_layers=2,
    kv_heads=3,
    head_dim=8,
    tp_size=1,
)
CONFIG = TransferConfig(heartbeat_ms=50, lease_ms=600)
PATIENT = TransferConfig(heartbeat_ms=100, lease_ms=60_000)
"""Settings with a lease that no test outlives. A loss that is noticed under them was noticed by other means."""
SAMPLING = SamplingParams(max_tokens=1, seed=1)
BLOCK_BYTES = 63 * 1024
WAIT_S = 10.0

E = TypeVar("E", bound=TransferEvent)


@cache
def compiled_poster() -> MakePoster:
    """Returns the maker of posters that engines use if there is a compiler."""
    return chosen_poster(UcxCalls.COMPILED, cache_folder(os.environ), digests=True)


@dataclass
class Engine:
    """An engine that only transfers blocks."""

    num_blocks: int = 32
    block_bytes: int = BLOCK_BYTES
    secret: bytes | Secrets = SECRET
    spec: EngineSpec = SPEC
    config: TransferConfig = CONFIG
    boot_id: bytes = field(default_factory=new_id)
    transport: Callable[[], Transport] | None = None
    ranks: tuple[str, ...] = ()
    max_prompt_tokens: int = 0
    step: StepUnderWay | None = None
    groups: Sequence[GroupBlocks] = ()
    """The blocks of each cache group, in place of ``num_blocks`` of ``block_bytes``."""
    shares: ClassVar[bool] = True
    """Whether engines may map each other's memory; ``mapped_or_not`` changes it."""

    def __post_init__(self) -> None:
        size = self.num_blocks * self.block_bytes
        if self.groups:
            size = max(group.start + group.count * group.block_bytes for group in self.groups)
        memory: Memory = SharedMemory(size) if self.shares else memoryview(bytearray(size))
        self.region = KvRegion(memory, self.groups or self.block_bytes)
        self.seen: list[TransferEvent] = []
        self._taken = 0
        self._woken = threading.Event()
        self.thread = TransferThread(
            boot_id=self.boot_id,
            secret=self.secret,
            spec=self.spec,
            region=self.region,
            settings=side_settings(self.config),
            transport=self.transport or partial(configured_ucx, self.config, compiled_poster()),
            wake=self._woken.set,
            ranks=self.ranks,
            max_prompt_tokens=self.max_prompt_tokens,
            step=self.step,
        )
        self.address = self.thread.start()

    def poll(self) -> None:
        self.seen.extend(self.thread.events())

    def next(self, kind: type[E], timeout_s: float = WAIT_S) -> E:
        """Returns the next event, which must be of this kind."""
        event = self.take(timeout_s)
        assert isinstance(event, kind), f"{event} where {kind.__name__} was due"
        return event

    def take(self, timeout_s: float = WAIT_S) -> TransferEvent:
        """Returns the next event."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._woken.clear()
            self.poll()
            if self._taken < len(self.seen):
                self._taken += 1
                return self.seen[self._taken - 1]
            left = deadline - time.monotonic()
            assert left > 0 and self._woken.wait(left), "no event in time"

    def quiet(self) -> bool:
        """Returns whether every event so far was taken."""
        self.poll()
        return self._taken == len(self.seen)

    def has_news_within(self, seconds: float) -> bool:
        """Returns whether an event comes in this time. Tests use it to show that none does.

        A wake-up alone is no news: the one for the event before may come after that event was taken.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._woken.clear()
            if not self.quiet():
                return True
            self._woken.wait(left)
        return not self.quiet()

    def fill(self, *block_ids: int) -> bytes:
        """Fills these blocks with random bytes and returns them."""
        for block_id in block_ids:
            block = self.region.block(block_id)
            block[:] = os.urandom(len(block))
        return self.read(*block_ids)

    def fill_with(self, content: bytes) -> None:
        """Fills all blocks."""
        self.region.bytes_at(0, len(content))[:] = content

    def read(self, *block_ids: int) -> bytes:
        return b"".join(bytes(self.region.block(block_id)) for block_id in block_ids)

    def close(self) -> None:
        self.thread.close(5.0)


@dataclass
class Pair:
    prefill: Engine
    decode: Engine

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget("p0", self.prefill.address, self.prefill.boot_id)

    def order(
        self,
        block_ids: tuple[int, ...],
        *,
        first_block: int = 0,
        deadline_s: float = 30.0,
        target: PrefillTarget | None = None,
    ) -> FetchOrder:
        """Returns an order that is not placed yet. The last block is partial, as most prompts' are."""
        return FetchOrder(
            transfer_id=TransferId(new_id(), 0, self.decode.boot_id),
            target=target or self.target,
            token_ids=list(range((first_block + len(block_ids)) * self.decode.spec.block_size - 3)),
            first_block=first_block,
            block_ids=block_ids,
            sampling=SAMPLING,
            deadline_s=deadline_s,
        )

    def fetch(self, block_ids: tuple[int, ...], **kwargs: float) -> TransferId:
        order = replace(self.order(block_ids), **kwargs)  # type: ignore[arg-type]
        self.decode.thread.fetch(order)
        return order.transfer_id


@contextmanager
def engine(**settings: Any) -> Iterator[Engine]:
    made = Engine(**settings)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def pair(
    *,
    decode_secret: bytes | Secrets = SECRET,
    prefill_secret: bytes | Secrets = SECRET,
    decode_spec: EngineSpec = SPEC,
    config: TransferConfig = CONFIG,
    transport: Callable[[], Transport] | None = None,
) -> Iterator[Pair]:
    with (
        engine(config=config, transport=transport, secret=prefill_secret) as prefill,
        engine(config=config, transport=transport, secret=decode_secret, spec=decode_spec) as decode,
    ):
        yield Pair(prefill, decode)
