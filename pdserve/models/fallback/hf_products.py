"""Computes the products of a transformers model with packed weights.

transformers' linear layers multiply with weights as a file has them; in bf16 on a CPU that takes 2 to 9 times as long
as with packed ones. A model's code may do other things with a linear layer than call it, such as read its weight. So
the layers are watched while the model is checked, and those that were called and nothing else are packed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pdserve_kernels.contract import Kernels, Linear


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
