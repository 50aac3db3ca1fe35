"""The other parts of a step: attention over all layers, and the choice of tokens."""

from __future__ import annotations

import torch

from pdserve.bench.engine.subject import Subject
from pdserve.bench.engine.timing import seconds_of
from pdserve.engine.sampler import sample
from pdserve.engine.sampling_row import SamplingRow
from pdserve.models.step_batch import StepRow
from pdserve.wire.sampling import SamplingParams
from pdserve_kernels.contract import AttentionRow


@torch.inference_mode()
def attention_s(subject: Subject, rows: list[StepRow], budget_s: float) -> float:
    """Planning the attention of a step with ``rows``, and computing it in every layer.

    Where decode steps are recorded, so are their layers here, and the time is that of a replay: launched one by one
    they would take the host longer than the GPU.
    """
    runner, config = subject.runner, subject.config
    spans = [AttentionRow(len(row.token_ids), row.context_len, row.block_table) for row in rows]
    tokens = sum(span.new_tokens for span in spans)
    shape = (tokens, config.heads, config.head_dim)
    query = torch.randn(shape, device=subject.device).to(subject.dtype)
    key_value = torch.full((2, tokens, config.kv_heads, config.head_dim), 0.01, device=subject.device)
    key_value = key_value.to(subject.dtype)

    def call() -> None:
        attend = subject.kernels.plan_attention(
            runner.layout, runner.kv_cache, spans, config.heads, config.attention_scale
        )
        for layer in range(config.num_layers):
            attend(layer, query, key_value)

    if subject.graphs is None or any(span.new_tokens > 1 for span in spans):
        return seconds_of(call, subject.device, budget_s)
    attend = subject.kernels.plan_attention(runner.layout, runner.kv_cache, spans, config.heads, config.attention_scale)

    def layers() -> None:
        for layer in range(config.num_layers):
            attend(layer, query, key_value)

    graph = subject.graphs()
    graph.capture(layers)
    return seconds_of(graph.replay, subject.device, budget_s)


@torch.inference_mode()
def sampling_s(subject: Subject, batch: int, sampling: SamplingParams, budget_s: float) -> float:
    """Choosing a token for each of ``batch`` requests."""
    logits = torch.randn(batch, subject.config.vocab_size, device=subject.device)
    rows = [SamplingRow(sampling, range(position), 0) for position in range(batch)]
    return seconds_of(lambda: sample(logits, rows), subject.device, budget_s)
