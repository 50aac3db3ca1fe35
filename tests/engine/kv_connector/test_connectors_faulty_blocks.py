"""Tests that a faulty transport causes no wrong token: two engines with a tiny model, and real UCX between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from pdserve.config import KvOverlap, TransferConfig
from pdserve.engine.api_channel import WakeUp
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector import KvConnector
from pdserve.engine.kv_connector.prompt_fetcher import PromptFetcher
from pdserve.engine.kv_connector.prompt_pusher import PromptPusher, PushSchedule
from pdserve.engine.kv_connector.transfer_memory import region_of
from pdserve.models.runner import ModelRunner
from pdserve.wire.ids import new_id
from pdserve.wire.terms import PrefillTarget
from pdserve_kvtransfer.configuration import side_settings
from pdserve_kvtransfer.thread import TransferThread
from pdserve_kvtransfer.transport import Transport
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from tests.engine.placements import make_placement
from tests.engine.test_step_loop import BLOCK_SIZE, Client, engine, prompt
from tests.engine.whole_connector import whole_connector
from tests.eventually import eventually
from tests.kvtransfer.faulty import AT_RECEIVER, Fault, Injector, faulty
from tests.kvtransfer.rig import SECRET, SPEC
from tests.tiny_models import SHAPE, save_tiny_model

pytestmark = pytest.mark.integration

OWN_SPEC = msgspec.structs.replace(
    SPEC,
    dtype="fp32",
    block_size=BLOCK_SIZE,
    num_layers=SHAPE["num_hidden_layers"],
    kv_heads=SHAPE["num_key_value_heads"],
    head_dim=SHAPE["head_dim"],
)
CONFIG = TransferConfig(heartbeat_ms=50, lease_ms=400)
EVERY = 29
BREAKS_LINKS = frozenset({Fault.SEND_FAILS, Fault.RECEIVE_FAILS})
MOST_ROUNDS = 6
"""Two are enough, but where a busy machine lets a lease run out, more prompts are computed without a transfer."""
LENGTHS = (9, 17, 30, 33, 42, 50, 64, 70)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[int, list[int]]:
    """Returns the answers of a single engine."""
    with engine(folder, overlap=False) as mixed:
        return {length: mixed.ask(prompt(length), [length])[0] for length in LENGTHS}


@dataclass
class Threads:
    """The transfer threads of a prefill and a decode engine."""

    target: PrefillTarget | None = None
    decode: TransferThread | None = None

    def connector(
        self, prefills: bool, transport: Callable[[], Transport]
    ) -> Callable[[ModelRunner, BlockManager, WakeUp], KvConnector]:
        def connect(runner: ModelRunner, blocks: BlockManager, wake_up: WakeUp) -> KvConnector:
            boot = new_id()
            region = region_of(runner.kv_cache)
            thread = TransferThread(
                boot_id=boot,
                secret=SECRET,
                spec=OWN_SPEC,
                region=region,
                settings=side_settings(CONFIG),
                transport=transport,
                wake=wake_up.set,
            )
            control = thread.start()
            if prefills:
                self.target = PrefillTarget("p", control, boot)
            else:
                self.decode = thread
            schedule, placement = PushSchedule(KvOverlap.ON), make_placement(BLOCK_SIZE)
            pushing = PromptPusher(blocks, thread, lambda ids, sampling: None, 100, schedule, placement)
            timeout_s = CONFIG.prefill_timeout_ms / 1000
            fetching = PromptFetcher(blocks, thread, timeout_s, boot, placement)
            return whole_connector(thread, blocks, fetching, pushing, boot)

        return connect


@contextmanager
def engines(folder: Path, fault: Fault, injector: Injector) -> Iterator[tuple[Client, TransferThread]]:
    """Yields the decode engine of a pair whose blocks pass through the injector."""
    bad, good = faulty(lambda: UcxTransport(""), injector), lambda: UcxTransport("")
    at_receiver = fault in AT_RECEIVER
    threads = Threads()
    with (
        engine(folder, overlap=False, connect=threads.connector(True, good if at_receiver else bad)),
        engine(folder, overlap=False, connect=threads.connector(False, bad if at_receiver else good)) as decode,
    ):
        assert threads.target is not None
        assert threads.decode is not None
        decode.targets = (threads.target, threads.target)
        yield decode, threads.decode


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name)
def test_no_faulty_block_becomes_a_token(folder: Path, wanted: dict[int, list[int]], fault: Fault) -> None:
    injector = Injector(fault, EVERY)
    with engines(folder, fault, injector) as (decode, transfers):
        # While a broken link is made anew, the decode engine computes the next prompts itself.
        least = 1 if fault in BREAKS_LINKS else len(LENGTHS) + 1
        for attempt in range(MOST_ROUNDS):
            for length in LENGTHS:
                # Each request has a salt of its own, so no prefix cache has its blocks and all have to come.
                assert decode.ask(prompt(length), [length], f"{attempt} {length}") == [wanted[length]]
            if attempt and injector.injected and transfers.stats().transfers_received >= least:
                break
        assert injector.injected > 0
        assert transfers.stats().transfers_received >= least, "blocks came from the prefill engine all the same"
        eventually(lambda: transfers.stats().quarantined_blocks == 0, "nothing is in quarantine")
