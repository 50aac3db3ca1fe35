"""Tests that a GPU's KV cache passes through host memory: the copier with a GPU's kernels, streams and events."""

from __future__ import annotations

import threading

import torch

from pdserve.engine.kv_connector.staging.block_copier import BlockCopier
from pdserve_kernels.triton import cache_ops
from tests.kernels.triton.device import DEVICE

NUM_BLOCKS, SLOTS, JOBS = 40, 16, 12
PATIENCE_S = 60.0


class GpuCopies:
    gather = staticmethod(cache_ops.gather_blocks)
    scatter = staticmethod(cache_ops.scatter_blocks)


def test_blocks_go_to_the_host_and_back_while_the_device_computes() -> None:
    torch.manual_seed(0)
    cache = torch.randn(NUM_BLOCKS, 2, 4, 2, 16, 32).to(DEVICE, torch.bfloat16)
    before = cache.cpu()
    slots = torch.zeros(SLOTS, *cache.shape[1:], dtype=cache.dtype, pin_memory=cache.device.type == "cuda")
    news = threading.Semaphore(0)
    mover: BlockCopier[int] = BlockCopier(cache, slots, GpuCopies(), news.release)
    sources, targets = range(SLOTS), range(NUM_BLOCKS - SLOTS, NUM_BLOCKS)
    for job in range(JOBS):
        # The device gets this addition before the copy is ordered, so the copy has to see its result.
        cache[sources.start : sources.stop] += 1
        mover.download(2 * job, sources, sources)
        mover.upload(2 * job + 1, sources, targets)
        done: list[int] = []
        while len(done) < 2:
            assert news.acquire(timeout=PATIENCE_S)
            assert mover.failure is None
            done += mover.done()
        assert done == [2 * job, 2 * job + 1]
        wanted = cache[sources.start : sources.stop].cpu()
        assert torch.equal(slots, wanted)
        assert torch.equal(cache[targets.start : targets.stop].cpu(), wanted)
    mover.close(PATIENCE_S)
    middle = slice(SLOTS, NUM_BLOCKS - SLOTS)
    assert torch.equal(cache[middle].cpu(), before[middle])
