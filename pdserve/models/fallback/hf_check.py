"""Checks, when a transformers model is loaded, that paged attention gives the same logits for short prompts.

The check finds what would otherwise go wrong unnoticed: masks of a model's own, caps and biases on scores, layers that
mix tokens outside of attention, and positions that a model counts instead of taking those given.

A model that is served in bf16 is checked in fp32, where a difference is an error and no rounding: one weight at a time
is widened (``InFp32``), so the check takes no more memory for that than a layer.

transformers' linear layers multiply with weights as a file has them; in bf16 on a CPU that takes 2 to 9 times as long
as with packed ones. A model's code may do other things with a linear layer than call it, such as read its weight. So
the layers are watched during the check (``Product``), and those that were called and nothing else are packed.
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
from pdserve.models.fallback.hf_decoder import HfDecoder, check_tensors, load_hf_model, with_other_settings
from pdserve_kernels.contract import AttentionRow, Kernels
from pdserve_kernels.kv_layout import KvLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from pdserve_kernels.contract import Linear

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


HALVES = (torch.bfloat16, torch.float16)
PIECE = 2**24
"""So many numbers of a linear layer's weight are in fp32 at a time: 64 MiB."""
_PARTS: frozenset[Any] = frozenset(
    {F.embedding, torch.embedding, torch.index_select, torch.Tensor.index_select, torch.Tensor.__getitem__}
)
"""The functions that give a part of a weight: the part is widened, not the weight."""


class InFp32(TorchFunctionMode):
    """Within it, the weights and buffers of ``model`` are fp32 to everybody who computes with them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        tensors = (*model.parameters(), *model.buffers())
        self._halves = {id(tensor): tensor for tensor in tensors if tensor.dtype in HALVES}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and len(args) > 1 and self._is_half(args[1]):
            return self._linear(*args, **kwargs)
        if func in _PARTS or getattr(func, "__name__", "") == "__get__":
            found = func(*args, **kwargs)
            return self._wide(found) if any(map(self._is_half, args)) else found
        args, kwargs = tree_map_only(torch.Tensor, self._widened, (args, kwargs))
        return func(*args, **kwargs)

    def _is_half(self, value: object) -> bool:
        return id(value) in self._halves

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if self._is_half(tensor) else tensor

    @staticmethod
    def _wide(value: Any) -> Any:
        """Returns a tensor or a dtype in fp32, and what is neither as it is."""
        if isinstance(value, torch.dtype):
            return torch.float32 if value in HALVES else value
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiplies with a piece of the weight after the other."""
        rows = max(1, PIECE // weight.shape[1])
        parts = [F.linear(x, weight[at : at + rows].float()) for at in range(0, weight.shape[0], rows)]
        product = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return product if bias is None else product + self._wide(bias)


class Product(torch.nn.Module):
    """Takes the place of a linear layer. It multiplies with the layer's own weight until it is packed."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("weight", linear._parameters["weight"])
        self.register_parameter("bias", linear._parameters["bias"])
        self._called = self._read = False
        self._packed: Linear | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            self._read = True
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., in]`` to ``[..., out]``."""
        if self._packed is not None:
            return self._packed(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        self._called = True
        return F.linear(x, self._parameters["weight"], self._parameters["bias"])  # type: ignore[arg-type]

    def pack(self, kernels: Kernels) -> None:
        """Packs the weight, which is freed, if the layer was called, and nobody read its weight or bias."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if weight is None or self._read or not self._called:
            return
        self._packed = kernels.linear(weight.data, None if bias is None else bias.data)
        del self._parameters["weight"], self._parameters["bias"]


def watch_products(model: torch.nn.Module) -> list[Product]:
    """Puts a ``Product`` in the place of every linear layer that is no more than one, and returns them."""
    products: dict[torch.nn.Linear, Product] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is torch.nn.Linear and "forward" not in vars(child) and not child._forward_hooks:
                products.setdefault(child, Product(child))
                parent._modules[name] = products[child]
    return list(products.values())
