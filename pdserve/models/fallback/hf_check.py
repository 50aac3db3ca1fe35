"""Checks, when a transformers model is loaded, that paged attention gives the same logits for short prompts.

The check finds what would otherwise go wrong unnoticed: masks of a model's own, caps and biases on scores, layers that
mix tokens outside of attention, and positions that a model counts instead of taking those given.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FallbackConfig
from pdserve.models.fallback.hf_decoder import HfDecoder
from pdserve.models.fallback.hf_loading import check_tensors, load_hf_model
from pdserve_kernels.contract import AttentionRow, Kernels
from pdserve_kernels.kv_layout import KvLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""The rotary scalings whose frequencies depend on the context length, which a short prompt does not show."""
WINDOW = 7
"""The length of all windows during the check, so that a short prompt is longer than they are."""
BLOCK_SIZE = 4
LONG, SHORT = 24, 11
CUTS: tuple[tuple[tuple[int, int], ...], ...] = (((0, 0), (0, 9)), ((0, 10), (9, 23)), ((10, 11), (23, 24)))
"""The tokens (from, to) of the short and the long prompt in each step: chunks, two requests at once, single tokens."""
TOLERANCE = 2e-3
"""The largest difference allowed, relative to the largest logit. Rounding in fp32 stays well below a tenth of it."""


def checked_hf_decoder(folder: Path, config: FallbackConfig, kernels: Kernels, dtype: torch.dtype) -> HfDecoder:
    """Returns the model in ``folder``, after its logits in fp32 were found to be those of transformers.

    During the check the model is held in fp32. Raises ModelError, which says what does not fit.
    """
    _refuse_what_short_prompts_hide(config)
    if getattr(config.hf, "quantization_config", None) is None:
        # The quantisations that transformers knows have tensors of their own, which show when they are loaded.
        check_tensors(folder, config.hf)
    hf = copy.deepcopy(config.hf)
    shortened = isinstance(getattr(hf, "sliding_window", None), int) and hf.sliding_window > WINDOW
    if shortened:
        hf.sliding_window = WINDOW
    decoder = _check(config, load_hf_model(folder, hf, torch.float32), kernels)
    if dtype is torch.float32 and not shortened:
        return decoder
    del decoder
    return HfDecoder(config, load_hf_model(folder, copy.deepcopy(config.hf), dtype))


def _refuse_what_short_prompts_hide(config: FallbackConfig) -> None:
    parameters = getattr(config.hf, "rope_parameters", None) or {}
    for found in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if found.get("rope_type") in LENGTH_DEPENDENT:
            raise ModelError(f"rotary scaling {found['rope_type']!r} of a {config.family} model is not supported")


@torch.inference_mode()
def _check(config: FallbackConfig, model: PreTrainedModel, kernels: Kernels) -> HfDecoder:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (length,), generator=generator) for length in (SHORT, LONG)]
    try:
        wanted = [model(prompt.unsqueeze(0), use_cache=False).logits[0].float() for prompt in prompts]
        decoder = HfDecoder(config, model)
        found = _in_steps(config, decoder, prompts, kernels)
    except ModelError as exc:
        raise ModelError(f"a {config.family} model cannot be served: {exc}") from exc
    except Exception as exc:
        # A model's code may raise any exception if it does not find what it expects.
        raise ModelError(
            f"a {config.family} model cannot be served: transformers' code of it does not run with paged attention "
            f"({type(exc).__name__}: {exc})"
        ) from exc
    for ours, theirs in zip(found, wanted, strict=True):
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        if not difference <= TOLERANCE:
            raise ModelError(
                f"a {config.family} model cannot be served: with paged attention its logits differ from those of "
                f"transformers by {difference:.1%}"
            )
    return decoder


def _in_steps(
    config: FallbackConfig, decoder: HfDecoder, prompts: Sequence[torch.Tensor], kernels: Kernels
) -> list[torch.Tensor]:
    """Returns the logits of every token of each prompt, computed in steps as an engine does."""
    layout = KvLayout(config.kv_heads, config.num_layers, BLOCK_SIZE, config.head_dim, torch.float32)
    each = -(-LONG // BLOCK_SIZE)
    cache = layout.allocate(len(prompts) * each, torch.device("cpu"))
    tables = [range(i * each, (i + 1) * each) for i in range(len(prompts))]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for cut in CUTS:
        rows = [(i, start, end) for i, (start, end) in enumerate(cut) if end > start]
        spans = [AttentionRow(end - start, end, tables[i]) for i, start, end in rows]
        attention = kernels.plan_attention(layout, cache, spans, config.heads, config.attention_scale)
        step = decoder.step(attention)
        token_ids = torch.cat([prompts[i][start:end] for i, start, end in rows])
        positions = torch.cat([torch.arange(start, end) for _, start, end in rows])
        logits = _logits(decoder, decoder.compute(token_ids, positions, step))
        if unlike := sorted(window for window in step.windows if window > WINDOW):
            raise ModelError(f"its window of {unlike[0]} is not its configuration's sliding_window")
        if step.layers != set(range(config.num_layers)):
            raise ModelError(f"of its {config.num_layers} layers only {sorted(step.layers)} attend")
        ends = [0]
        for _, start, end in rows:
            ends.append(ends[-1] + end - start)
        for (i, _, _), (first, last) in zip(rows, pairwise(ends), strict=True):
            found[i].append(logits[first:last])
    return [torch.cat(parts) for parts in found]


def _logits(decoder: HfDecoder, hidden: torch.Tensor) -> torch.Tensor:
    try:
        return decoder.logits(hidden)
    except AttributeError as exc:
        raise ModelError("its code does not compute its head from the last layer's output alone") from exc
