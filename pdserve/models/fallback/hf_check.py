"""Checks, when a transformers model is loaded, that paged attention gives the same logits for short prompts.

The check finds what would otherwise go wrong unnoticed: masks of a model's own, caps and biases on scores, layers that
mix tokens outside of attention, and positions that a model counts instead of taking those given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FallbackConfig
from pdserve.models.fallback.hf_decoder import HfDecoder
from pdserve.models.fallback.hf_loading import check_tensors, load_hf_model, with_other_settings
from pdserve.models.fallback.hf_products import watch_products
from pdserve.models.fallback.in_fp32 import InFp32
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


def checked_hf_decoder(
    folder: Path, config: FallbackConfig, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> HfDecoder:
    """Returns the model in ``folder``, after its logits in fp32 were found to be those of transformers.

    The model is loaded in ``dtype``; the check widens one weight at a time. Raises ModelError, which says what does not
    fit.
    """
    _refuse_what_short_prompts_hide(config)
    quantised = getattr(config.hf, "quantization_config", None) is not None
    if not quantised:
        # The quantisations that transformers knows have tensors of their own, which show when they are loaded.
        check_tensors(folder, config.hf)
    short = copy.deepcopy(config.hf)
    if isinstance(getattr(short, "sliding_window", None), int) and short.sliding_window > WINDOW:
        short.sliding_window = WINDOW
    prompts = _prompts(config, device)
    if quantised:
        # Their layers compute in the numbers that they were loaded for.
        _check_logits(config, load_hf_model(folder, short, torch.float32, device), prompts, kernels)
    model = load_hf_model(folder, copy.deepcopy(config.hf), dtype, device)
    products = watch_products(model) if device.type == "cpu" else []
    if not quantised:
        _check_logits(config, with_other_settings(model, short), prompts, kernels)
    for product in products:
        product.pack(kernels)
    with _said_of(config):
        decoder = HfDecoder(config, model)
        for logits in _in_steps(config, decoder, prompts, kernels, dtype):
            if not bool(logits.isfinite().all()):
                raise ModelError(f"in {dtype} its logits are not finite")
    return decoder


def _refuse_what_short_prompts_hide(config: FallbackConfig) -> None:
    parameters = getattr(config.hf, "rope_parameters", None) or {}
    for found in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if found.get("rope_type") in LENGTH_DEPENDENT:
            raise ModelError(f"rotary scaling {found['rope_type']!r} of a {config.family} model is not supported")


def _prompts(config: FallbackConfig, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab_size, (length,), generator=generator).to(device) for length in (SHORT, LONG)]


@contextmanager
def _said_of(config: FallbackConfig) -> Iterator[None]:
    """Makes of every error a ModelError that names the family."""
    try:
        yield
    except ModelError as exc:
        raise ModelError(f"a {config.family} model cannot be served: {exc}") from exc
    except Exception as exc:
        # A model's code may raise any exception if it does not find what it expects.
        raise ModelError(
            f"a {config.family} model cannot be served: transformers' code of it does not run with paged attention "
            f"({type(exc).__name__}: {exc})"
        ) from exc


@torch.inference_mode()
def _check_logits(
    config: FallbackConfig, model: PreTrainedModel, prompts: Sequence[torch.Tensor], kernels: Kernels
) -> None:
    """Raises ModelError if ``model``, with eager attention, has other logits with paged attention."""
    with _said_of(config), InFp32(model):
        wanted = [model(prompt.unsqueeze(0), use_cache=False).logits[0].float() for prompt in prompts]
        decoder = HfDecoder(config, model)
        found = _in_steps(config, decoder, prompts, kernels, torch.float32, WINDOW)
        for ours, theirs in zip(found, wanted, strict=True):
            difference = float((ours - theirs).abs().max() / theirs.abs().max())
            if not difference <= TOLERANCE:
                raise ModelError(
                    f"with paged attention its logits differ from those of transformers by {difference:.1%}"
                )


@torch.inference_mode()
def _in_steps(
    config: FallbackConfig,
    decoder: HfDecoder,
    prompts: Sequence[torch.Tensor],
    kernels: Kernels,
    dtype: torch.dtype,
    widest: int | None = None,
) -> list[torch.Tensor]:
    """Returns the logits of every token of each prompt, computed in steps as an engine does.

    Raises ModelError if a layer does not attend, or sees more than ``widest`` tokens through a window.
    """
    layout = KvLayout(config.kv_heads, config.num_layers, BLOCK_SIZE, config.head_dim, dtype)
    each = -(-LONG // BLOCK_SIZE)
    device = prompts[0].device
    cache = layout.allocate(len(prompts) * each, device)
    tables = [range(i * each, (i + 1) * each) for i in range(len(prompts))]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for cut in CUTS:
        rows = [(i, start, end) for i, (start, end) in enumerate(cut) if end > start]
        spans = [AttentionRow(end - start, end, tables[i]) for i, start, end in rows]
        attention = kernels.plan_attention(layout, cache, spans, config.heads, config.attention_scale)
        step = decoder.step(attention)
        token_ids = torch.cat([prompts[i][start:end] for i, start, end in rows])
        positions = torch.cat([torch.arange(start, end, device=device) for _, start, end in rows])
        logits = _logits(decoder, decoder.compute(token_ids, positions, step))
        if unlike := sorted(window for window in step.windows if widest is not None and window > widest):
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
