"""Computes a model in fp32 whose weights are in half as many bits, with one weight at a time in fp32.

So a model that is served in bf16 is checked in fp32, where a difference is an error and no rounding, and takes no more
memory for that than a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

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
