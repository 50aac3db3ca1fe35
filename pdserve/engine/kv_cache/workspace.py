"""How much GPU memory a rank needs for computing, beside weights and KV cache.

It is counted from what is in memory at the same time, so that a step of any size that the settings allow has room. The
sum is that of rank 0, which alone has all logits.
"""

from __future__ import annotations

import torch

from pdserve.config import SchedulerConfig
from pdserve.engine.sampling.sampling_row import sampling_bytes
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FamilyConfig
from pdserve.models.runner import SCORED_LOGITS

LIBRARY_BYTES = 2**30
"""What libraries, compiled kernels and the nodes of recorded steps take, and what torch's allocator cannot use."""

SCORING_BYTES_PER_LOGIT = 32
"""What is computed of logits of a prompt's tokens takes at most this."""

_INDEX_BYTES = 8
_FP32_BYTES = 4


def workspace_bytes(
    decoder: DecoderConfig, scheduler: SchedulerConfig, dtype: torch.dtype, ranks: int, block_bytes: int
) -> int:
    """Returns the bytes that stay free for computing. Recorded steps have memory of their own, which stays theirs.

    Before a step, a block of ``block_bytes`` may be copied for each of its requests.
    """
    rows, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    recorded = rows * decoder.vocab_size * _FP32_BYTES + step_bytes(decoder, dtype, ranks, rows, rows)
    scored = max(SCORED_LOGITS, decoder.vocab_size)
    scoring = scored * SCORING_BYTES_PER_LOGIT + logits_bytes(1, scored, dtype, ranks)
    sampling = sampling_bytes(rows, decoder.vocab_size)
    beside = max(scoring, sampling, rows * block_bytes)
    return LIBRARY_BYTES + recorded + step_bytes(decoder, dtype, ranks, tokens, rows) + beside


def step_bytes(decoder: DecoderConfig, dtype: torch.dtype, ranks: int, tokens: int, rows: int) -> int:
    """Returns the most bytes that a step of ``tokens`` has in memory at once, the logits of ``rows`` tokens included.

    The logits of the step before are there until they are sampled.
    """
    logits = logits_bytes(rows, decoder.vocab_size, dtype, ranks)
    return tokens * _token_bytes(decoder, dtype, ranks) + logits + rows * decoder.vocab_size * _FP32_BYTES


def logits_bytes(rows: int, vocab_size: int, dtype: torch.dtype, ranks: int) -> int:
    """Returns the bytes of logits as the head gives them, those that ranks exchange, and as fp32."""
    parts = 1 if ranks == 1 else 3
    return rows * (vocab_size + ranks) * (parts * dtype.itemsize + _FP32_BYTES)


def _token_bytes(decoder: DecoderConfig, dtype: torch.dtype, ranks: int) -> int:
    """Returns the most bytes that one token's activations have at once, in the widest part of a layer."""
    # Ranks may share KV heads, so each holds at least one.
    heads, kv_heads = -(-decoder.heads // ranks), -(-decoder.kv_heads // ranks)
    attention = (3 * heads + 2 * kv_heads) * decoder.head_dim
    widest, own = attention, 0
    if isinstance(decoder, FamilyConfig):
        widest = max(widest, 3 * -(-decoder.intermediate_size // ranks))
    if isinstance(decoder, FamilyConfig) and decoder.experts is not None:
        widest = max(widest, 3 * -(-decoder.experts.channels // ranks) + decoder.hidden_size)
        # What the router gives each expert and each chosen one, and where the chosen ones are.
        own = decoder.experts.count * 3 * _FP32_BYTES + decoder.experts.chosen * 8 * _INDEX_BYTES
    # The residual, what is added to it, both after a norm, the layer's result, and the angles of the positions.
    return (widest + 5 * decoder.hidden_size + 4 * decoder.head_dim) * dtype.itemsize + own + 4 * _INDEX_BYTES
