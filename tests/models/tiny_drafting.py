"""Tiny random checkpoints with a layer that drafts tokens, and what it drafts, computed by transformers' layers.

transformers writes no such layer. So a model with one layer more is saved, whose last one is made the one that drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from pdserve.models.drafting import Choose, likeliest
from tests.models.tiny_families import CASES, FULL, config_of, save_tiny

DEEPSEEK = {"projection": "eh_proj", "embedding": "enorm", "hidden": "hnorm", "last": "shared_head.norm"}
QWEN = {
    "projection": "fc",
    "embedding": "pre_fc_norm_embedding",
    "hidden": "pre_fc_norm_hidden",
    "last": "norm",
}
CHANGES: dict[str, dict[str, Any]] = {
    "glm4-moe": {"first_k_dense_replace": 1},
    "glm-moe-dsa": {"indexer_types": [*CASES["glm-moe-dsa"][1]["indexer_types"], "full"]},
    "qwen3-next": {"layer_types": [*CASES["qwen3-next"][1]["layer_types"], FULL]},
    "qwen3-5": {"layer_types": [*CASES["qwen3-5"][1]["layer_types"], FULL]},
    "qwen3-5-moe": {"layer_types": [*CASES["qwen3-5-moe"][1]["layer_types"], FULL]},
}
"""The settings of the larger model that each case needs."""


def _names(case: str) -> dict[str, str]:
    return QWEN if case.startswith("qwen") else DEEPSEEK


def save_tiny_drafting(case: str, folder: Path, **changes: object) -> Path:
    """Saves the model of a case in ``folder``, with a layer that drafts, and the larger model in a folder within it."""
    larger = folder / "larger"
    count = config_of(case).num_hidden_layers
    save_tiny(case, larger, num_hidden_layers=count + 1, **CHANGES.get(case, {}), **changes)
    settings = json.loads((larger / "config.json").read_text())
    settings["num_hidden_layers"] = count
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if settings.get(name):
            settings[name] = settings[name][:-1]
    (folder / "config.json").write_text(json.dumps(settings))
    prefix = f"model.layers.{count}."
    own = "mtp." if case.startswith("qwen") else prefix
    layer = f"{own}layers.0." if case.startswith("qwen") else prefix
    tensors = load_file(larger / "model.safetensors")
    tensors = {(name.replace(prefix, layer) if name.startswith(prefix) else name): tensors[name] for name in tensors}
    hidden, names = settings["hidden_size"], _names(case)
    random = torch.Generator().manual_seed(len(case))
    tensors[f"{own}{names['projection']}.weight"] = 0.4 * torch.randn(hidden, 2 * hidden, generator=random)
    for norm in ("embedding", "hidden", "last"):
        tensors[f"{own}{names[norm]}.weight"] = torch.rand(hidden, generator=random) + 0.5
    if not case.startswith("qwen"):
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def answering_with(folder: Path, tokens: Sequence[int]) -> Path:
    """Makes nearly all answers of a model of the cases above consist of ``tokens``, so that some drafts are right."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("lm_head.weight", "shared_head.head.weight"))]:
        weight = tensors[name]
        # Not zero: equal logits have no likeliest token.
        tensors[name] = weight * 1e-3
        tensors[name][list(tokens)] = weight[list(tokens)]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def agreeing(folder: Path, noise: float) -> Path:
    """Makes a tiny GLM of ``save_tiny_drafting`` choose a token by the last one alone, and its drafts nearly so.

    The layer that drafts sees that token with ``noise``: without any, its distributions are those of the model.
    """
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    (projection,) = [name for name in tensors if name.endswith("eh_proj.weight")]
    prefix, hidden = projection.removesuffix("eh_proj.weight"), len(tensors[projection])
    random = torch.Generator().manual_seed(1)
    tensors[projection] = torch.eye(hidden, 2 * hidden) + noise * torch.randn(hidden, 2 * hidden, generator=random)
    tensors[f"{prefix}enorm.weight"].fill_(1.0)
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class ReferenceDrafts:
    """The drafts of a folder that ``save_tiny_drafting`` made, each computed from the whole context."""

    def __init__(self, case: str, folder: Path) -> None:
        auto: Any = AutoModelForCausalLM
        self._whole: PreTrainedModel = auto.from_pretrained(folder / "larger", dtype=torch.float32)
        count = config_of(case).num_hidden_layers
        kinds: dict[str, Any] = {"layer_types": [FULL]} if case.startswith("qwen") else {"first_k_dense_replace": 0}
        if getattr(self._whole.config, "mlp_layer_types", None):
            kinds = {"mlp_layer_types": ["sparse"]}
        if getattr(self._whole.config, "indexer_types", None):
            kinds["indexer_types"] = ["full"]
        self._layer: Any = auto.from_config(config_of(case, num_hidden_layers=1, **kinds), dtype=torch.float32).model
        whole: Any = self._whole
        self._layer.layers[0].load_state_dict(whole.model.layers[count].state_dict())
        self._layer.eval()
        whole.model.layers = whole.model.layers[:count]
        whole.config.num_hidden_layers = count
        self._tensors = load_file(folder / "model.safetensors")
        self._own, self._names = ("mtp." if case.startswith("qwen") else f"model.layers.{count}."), _names(case)
        self._offset = 1.0 if case.startswith("qwen") else 0.0
        self._eps: float = whole.config.rms_norm_eps
        with torch.no_grad():
            self._layer.norm.weight.copy_(self._tensor("last"))

    def _tensor(self, name: str) -> torch.Tensor:
        return self._tensors[f"{self._own}{self._names[name]}.weight"]

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps)
        return scaled * (self._tensor(name) + self._offset)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int, choose: Choose = likeliest) -> list[int]:
        """Returns ``count`` drafts of what follows ``tokens``, the last of which the model has not computed yet."""
        whole: Any = self._whole
        following = list(tokens[1:])
        hidden = whole.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        found: list[int] = []
        while True:
            embedded = whole.model.embed_tokens(torch.tensor(following))
            both = torch.cat((self._normed(embedded, "embedding"), self._normed(hidden, "hidden")), 1)
            given = both @ self._tensor("projection").T
            last = self._layer(inputs_embeds=given[None]).last_hidden_state[0, -1:]
            found.append(int(choose(whole.lm_head(last), [0], len(found))))
            if len(found) == count:
                return found
            following.append(found[-1])
            hidden = torch.cat((hidden, last))
