"""What recipes and kernels say of a feed-forward part. It needs no torch.

An ``Activation`` is the function between its products. ``Routing`` says how the outputs of a router become the experts
of a token and their weights.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Scoring(enum.Enum):
    """How a router's outputs become the weights of experts."""

    SOFTMAX = "softmax"
    """Softmax over all experts, of which the largest are chosen."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """The largest are chosen, and softmax is taken over these."""
    SIGMOID = "sigmoid"
    """Sigmoid of each output, of which the largest are chosen."""
    SIGMOID_OF_CHOSEN = "sigmoid_of_chosen"
    """The largest are chosen, and sigmoid is taken of these, so that no two are equal because both are almost 1."""
    ROOT_SOFTPLUS = "root_softplus"
    """Square root of the softplus of each output, of which the largest are chosen."""


class GroupScore(enum.Enum):
    """By what groups of experts are chosen, of the scores with their correction."""

    TWO_BEST = "two_best"
    """The sum of the two highest, as in DeepSeek-V3."""
    BEST = "best"
    """The highest, as in DeepSeek-V2."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a token's experts are chosen and weighed.

    The scores, plus a correction for each expert if there is one, are compared: first those of ``groups`` equal groups
    of experts, of which ``chosen_groups`` stay, and then those of the experts in these. The weights are the scores of
    the chosen ones without the correction, divided by their sum if they are ``normalised``, and then scaled.
    """

    chosen: int
    """The experts of each token."""
    scoring: Scoring = Scoring.SOFTMAX
    normalised: bool = False
    smallest_sum: float = 0.0
    """What is added to the sum by which weights are divided."""
    scale: float = 1.0
    """What the weights are multiplied by."""
    groups: int = 1
    chosen_groups: int = 1
    group_score: GroupScore = GroupScore.TWO_BEST

    def check(self, experts: int) -> None:
        """Raises ValueError if the rule cannot choose among so many experts."""
        if not 0 < self.chosen_groups <= self.groups or experts % self.groups:
            raise ValueError(f"{experts} experts are not {self.groups} equal groups to choose {self.chosen_groups} of")
        size = experts // self.groups
        if not 0 < self.chosen <= self.chosen_groups * size:
            raise ValueError(f"{self.chosen} experts cannot be chosen from {self.chosen_groups * size}")
        if self.groups > 1 and self.group_score is GroupScore.TWO_BEST and size < 2:
            raise ValueError(f"groups of {size} experts have no two best")


CLAMPED_SLOPE, CLAMPED_AT = 1.702, 7.0
LIMITED_AT = 10.0


class Activation(enum.Enum):
    """A function of each number. With gates, what a gate becomes is multiplied by its up."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    XIELU = "xielu"
    CLAMPED_SILU = "clamped_silu"
    """``gate * sigmoid(CLAMPED_SLOPE * gate) * (up + 1)``, of a gate up to ``CLAMPED_AT``, and an up within it."""
    LIMITED_SILU = "limited_silu"
    """``gate * sigmoid(gate) * up``, of a gate up to ``LIMITED_AT``, and an up within it."""
    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"
    SILU_TO_7 = "silu_to_7"
    """``silu(gate) * up``, of a silu up to 7, and an up within it."""
    SILU_TO_16 = "silu_to_16"
    """As well, with 16."""


SILU_BOUNDS = {7.0: Activation.SILU_TO_7, 16.0: Activation.SILU_TO_16}
"""The bounds of silu that there are."""
ALWAYS_GATED = frozenset({Activation.CLAMPED_SILU, Activation.LIMITED_SILU, *SILU_BOUNDS.values()})
"""The activations that are functions of a gate and an up."""
