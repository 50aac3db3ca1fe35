"""Routing: the rule's values give the experts and weights that DeepSeek's routers in transformers choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from pdserve_kernels import reference
from pdserve_kernels.feed_forward import GroupScore, Routing, Scoring

EXPERTS, HIDDEN, CHOSEN = 12, 6, 4
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
}
V2 = Routing(CHOSEN, scale=2.5)
V2_GROUPS = Routing(CHOSEN, scale=2.5, groups=4, chosen_groups=2, group_score=GroupScore.BEST)
V3 = Routing(CHOSEN, Scoring.SIGMOID, normalised=True, smallest_sum=1e-20, scale=2.5, groups=4, chosen_groups=2)


def dense(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Returns the weight of each expert, ``[tokens, experts]``, 0 for those that are not chosen."""
    return torch.zeros(len(weights), EXPERTS).scatter_(1, experts, weights)


def test_groups_are_chosen_as_in_deepseek_v3() -> None:
    random = torch.Generator().manual_seed(4)
    router = DeepseekV3TopkRouter(DeepseekV3Config(**SIZES, n_group=4, topk_group=2, routed_scaling_factor=2.5))
    torch.nn.init.normal_(router.weight, generator=random)
    # Some corrected scores are below 0.
    torch.nn.init.uniform_(router.e_score_correction_bias, -1.5, 1.5, generator=random)
    x = torch.randn(64, HIDDEN, generator=random)
    with torch.no_grad():
        logits, weights, experts = router(x)
    found = dense(*reference.route(logits, V3, router.e_score_correction_bias))
    torch.testing.assert_close(found, dense(weights, experts))
    other = dense(*reference.route(logits, V3))
    assert not torch.allclose(found, other), "the correction changes what is chosen"


@pytest.mark.parametrize(("method", "rule"), [("greedy", V2), ("group_limited_greedy", V2_GROUPS)])
def test_groups_are_chosen_as_in_deepseek_v2(method: str, rule: Routing) -> None:
    random = torch.Generator().manual_seed(5)
    config = DeepseekV2Config(**SIZES, topk_method=method, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight, generator=random)
    with torch.no_grad():
        logits, weights, experts = router(torch.randn(64, HIDDEN, generator=random))
    torch.testing.assert_close(dense(*reference.route(logits, rule)), dense(weights, experts))
