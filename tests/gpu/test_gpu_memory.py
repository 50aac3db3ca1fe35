"""Tests on a GPU that computing takes no more memory than is kept free for it."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.random_llama import Shape, write_random_model
from pdserve.config import Dtype, SchedulerConfig
from pdserve.engine.assembly import warm_up, warm_up_sampling
from pdserve.engine.kv_cache.cache_size import LIBRARY_BYTES, workspace_bytes
from pdserve.engine.sampling.logprobs import PendingScores, ScoredTokens
from pdserve.engine.sampling.pending_tokens import DeviceTokens
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import CudaGraphs, ModelRunner, StepRow
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.triton.triton_kernels import TritonKernels

CUDA = torch.device("cuda", 0)
SEQS, TOKENS, VOCAB = 256, 8192, 152_000
WIDE = SamplingParams(
    max_tokens=9, seed=1, top_p=0.999, top_k=VOCAB - 1, repetition_penalty=1.1, presence_penalty=0.5, logprobs=20
)


def test_the_largest_steps_and_their_sampling_fit_the_workspace(tmp_path: Path) -> None:
    write_random_model(Shape(1024, 14_336, 2, 32, 8, 128, VOCAB), tmp_path)
    decoder = read_decoder_config(tmp_path)
    kernels = TritonKernels.of(CUDA)
    runner = ModelRunner(tmp_path, decoder, Dtype.BF16, 16, 600, TOKENS, kernels, CUDA)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    scheduler = SchedulerConfig(max_num_seqs=SEQS, max_num_batched_tokens=TOKENS)
    counted = workspace_bytes(decoder, scheduler, torch.bfloat16, 1, runner.layout.block_bytes)

    warm_up(runner, TOKENS - 1, 16)
    runner.capture_decode(kernels, SEQS, CudaGraphs())
    warm_up_sampling(decoder.vocab_size, SEQS, CUDA)
    scores = PendingScores([ScoredTokens([5] * TOKENS, 20)])
    runner.run([StepRow([5] * TOKENS, 0, range(512), True, range(TOKENS))], score=scores.add)
    scores.read()
    last = torch.full((SEQS,), 7, device=CUDA)
    steps = [StepRow([5], 0, [block], True) for block in range(SEQS)]
    # A row that goes on with a prompt keeps the step from being replayed, so both kinds of logits are there.
    mixed = [*steps[1:], StepRow([5] * (TOKENS - SEQS), 0, range(512), True)]
    runner.copy_blocks(range(SEQS), range(SEQS, 2 * SEQS))
    for rows in (mixed, steps, steps):
        logits = runner.run(rows)
        asked = [SamplingRow(WIDE, [3, 4], 1, 1) for _ in rows]
        DeviceTokens(logits, asked, range(SEQS), frozenset({2}), last).read()
    torch.cuda.synchronize()

    peak = torch.cuda.max_memory_allocated() - allocated
    left, _ = torch.cuda.mem_get_info()
    print(f"counted {counted >> 20} MiB, allocated {peak >> 20} MiB, taken from the GPU {(free - left) >> 20} MiB")
    assert peak <= counted - LIBRARY_BYTES
    assert free - left <= counted
