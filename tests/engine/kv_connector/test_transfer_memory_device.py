"""Tests, as far as that works without a GPU, how UCX itself moves a GPU's KV cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from pdserve.config import KvOverlap, KvStaging, SchedulerConfig, Switch, TransferConfig
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.prompt_fetcher import PromptFetcher
from pdserve.engine.kv_connector.prompt_pusher import PromptPusher, PushSchedule
from pdserve.engine.kv_connector.transfer_memory import staging_memory, transport_for
from pdserve.engine.kv_connector.transfers import Fetches, Pushes
from pdserve.engine.request import Request
from pdserve.engine.scheduling.output_collector import OutputCollector
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import ConfigError, TransferError
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import Failed, PrefillRequest
from pdserve_kvtransfer.events import PushWanted
from pdserve_kvtransfer.region import DeviceMemory, KvRegion
from pdserve_kvtransfer.ucx.ucxx_poster import UcxxPoster
from tests.engine.kv_connector.test_connectors import ScriptedThread
from tests.engine.placements import make_placement
from tests.kvtransfer.fakes import FakeDecode
from tests.kvtransfer.rig import SAMPLING, engine
from tests.terms import made_terms

TRANSFER = TransferId(new_id(), 0, new_id())


def gpu_cache() -> torch.Tensor:
    """Returns the part of a GPU's cache that is looked at."""
    return cast(torch.Tensor, SimpleNamespace(device=torch.device("cuda", 0)))


def test_without_staging_a_gpu_needs_checksums_to_be_off() -> None:
    with pytest.raises(ConfigError, match="--kv-checksums off"):
        staging_memory(TransferConfig(staging=KvStaging.OFF), 1, gpu_cache())
    without = TransferConfig(staging=KvStaging.OFF, checksums=Switch.OFF)
    assert staging_memory(without, 1, gpu_cache()) is None
    checked = TransferConfig(staging=KvStaging.OFF)
    assert staging_memory(checked, 1, torch.zeros(1)) is None, "host memory is reached anyway"


def test_a_gpu_needs_compiled_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no g"):
        transport_for(TransferConfig(), tmp_path, gpu_cache().device, loopback=True)
    with pytest.raises(TransferError, match="compiled calls only"):
        UcxxPoster(None, None, DeviceMemory(4096, 64))


def test_the_memory_of_a_gpu_is_never_read() -> None:
    region = KvRegion(DeviceMemory(4096, 64), 16)
    assert (region.num_blocks, region.readable) == (4, False)
    with pytest.raises(ValueError, match="cannot be read"):
        region.block(0)


def test_blocks_leave_when_the_kernels_that_write_them_are_over() -> None:
    seen: list[object] = []
    transfers = ScriptedThread()
    transfers.push = lambda *arguments: seen.append(arguments)  # type: ignore[method-assign]
    blocks = BlockManager(4, 4, prefix_cache=False)
    connector = PromptPusher(
        blocks,
        cast(Pushes, transfers),
        lambda ids, sampling: None,
        100,
        PushSchedule(KvOverlap.ON),
        make_placement(4),
        lambda: seen.append("waited"),
    )
    scheduler = Scheduler(
        blocks,
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        StopRule(frozenset(), 60),
        OutputCollector(),
        connector.release,
        make_placement(4),
    )
    connector.on_event(scheduler, PushWanted(TRANSFER, [7] * 8, 0, SAMPLING, 5.0), 1.0)
    plan = scheduler.schedule(1.0)
    connector.start(plan)
    assert seen == [], "nothing is final yet"
    scheduler.postprocess(plan, [SampledToken(1)], 1.0)
    connector.stepped(scheduler, plan)
    assert seen == ["waited", (TRANSFER, 0, (0, 1))]


class FakeDevice:
    """A GPU whose kernels have written when the engine has waited for them."""

    def __init__(self) -> None:
        self.to_be_written: set[int] = set()

    def wait(self) -> None:
        self.to_be_written.clear()


def test_blocks_land_behind_the_kernels_that_were_to_write_them_before() -> None:
    """A chunk is launched, its client leaves, and a fetch gets its blocks."""
    device, thread = FakeDevice(), ScriptedThread()
    while_ordered: list[set[int]] = []
    thread.fetch = lambda order: while_ordered.append(device.to_be_written & set(order.block_ids))  # type: ignore[method-assign]
    blocks = BlockManager(4, 4, prefix_cache=False)
    placement = make_placement(4)
    fetches = cast(Fetches, thread)
    connector = PromptFetcher(blocks, fetches, 30.0, new_id(), placement, finish_writes=device.wait)
    scheduler = Scheduler(
        blocks,
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8),
        StopRule(frozenset(), 60),
        OutputCollector(),
        connector.release,
        placement,
    )

    def step(prompt: int, targets: tuple[PrefillTarget, ...] = ()) -> Request:
        request = Request(new_id(), [7] * prompt, prompt, SAMPLING, 0.0, made_terms(50.0, prefill=targets))
        scheduler.add(request)
        plan = scheduler.schedule(1.0)
        connector.start(plan, 1.0)
        device.to_be_written.update(*(work.request.block_table for work in plan.work))
        scheduler.postprocess(plan, [], 1.0)
        return request

    leaving = step(14)
    assert leaving.num_uncomputed_tokens == 6, "there is no token that anybody would wait for"
    scheduler.abort(leaving)
    assert device.to_be_written == {0, 1, 2, 3}
    step(14, (PrefillTarget("p", "tcp://127.0.0.1:1", new_id()),))
    assert while_ordered == [set()]


def test_a_decode_node_that_wants_checksums_is_told_that_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvRegion, "readable", False)
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        decode.greet()
        decode.send(
            PrefillRequest(
                transfer_id=TransferId(new_id(), 0, decode.boot_id),
                tag=1,
                token_ids=[1, 2],
                first_block=0,
                sampling=SAMPLING,
                deadline_s=5.0,
                digests=True,
            )
        )
        assert "--kv-checksums off" in decode.next(Failed).reason
        assert prefill.quiet(), "the engine does not hear of it"
