"""LG's EXAONE 4: norms behind each part, and windows in most layers of the larger models."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.models.families.olmo import NORMS_BEHIND
from pdserve.models.families.settings import FULL, NONE, SLIDING, Count, FamilySettings, windows_of
from pdserve.models.recipe import LayerRecipe, NormOrder, Rotary


class Exaone4Settings(FamilySettings, kw_only=True):
    """Where layers have windows, those that see everything do not know positions."""

    head_norms: ClassVar[bool] = True
    vocab_size: Count = 102_400
    intermediate_size: Count = 16_384
    num_key_value_heads: Count | None = 32
    rms_norm_eps: float = 1e-5
    sliding_window: Count | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: list[str] | None = None

    def biases(self) -> frozenset[str]:
        return NONE

    def windows(self) -> tuple[int | None, ...]:
        layers, pattern = self.num_hidden_layers, self.sliding_window_pattern
        if self.sliding_window is None:
            return (None,) * layers
        usual = [FULL] * layers
        if isinstance(pattern, int) and pattern > 0:
            usual = [SLIDING if (i + 1) % pattern and i < layers - 1 else FULL for i in range(layers)]
        elif isinstance(pattern, str):
            each = {"L": SLIDING, "G": FULL}
            usual = [each.get(pattern[i % len(pattern)], "") for i in range(layers)]
            usual[-1] = FULL
        return windows_of(self.layer_types, usual, layers, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return self.rotary() if self.sliding_window is None or self.windows()[index] is not None else None

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=NORMS_BEHIND, order=NormOrder.POST)
