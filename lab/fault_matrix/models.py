"""The models with which the cells are played: of whole contexts, with windows, with states, and one that drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.config import CacheConfig, Dtype
from pdserve.machine.memory import MIB
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.weight_form import ITEM_BYTES
from pdserve.models.layer_groups import Load, group_blocks, group_sizes
from tests.hosts.cluster import tiny_model
from tests.models.tiny_drafting import answering_with, save_tiny_drafting
from tests.models.tiny_families import FULL, SLIDING, save_tiny_chat_family
from tests.tiny_models import add_chat_tokenizer

MAX_REQUESTS = 8
STEP_TOKENS = 128
CONTEXT = 2048
BLOCK_SIZE = CacheConfig().block_size
_STATE = "linear_attention"
_WINDOWED: Mapping[str, object] = {"sliding_window": 64, "layer_types": [SLIDING, FULL] * 2}
_HYBRID: Mapping[str, object] = {
    "layer_types": [_STATE, FULL] * 2,
    # A state takes as much as the blocks of 56 tokens.
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


@dataclass(frozen=True)
class MatrixModel:
    """A model that computes almost instantly, though its prompts have much KV cache."""

    name: str
    kv_cache_mib: int
    """So much that four of the long prompts do not fit into a node."""
    case: str = ""
    """Its family's case among those of the tests; empty for a Llama."""
    settings: Mapping[str, object] = field(default_factory=dict)
    drafts: bool = False
    """Whether it has a layer that drafts tokens, and its nodes draft by that."""

    def save(self, demo_model: Path, folder: Path) -> Path:
        """Saves the model in ``folder``, with the demo model's tokenizer, and returns the folder."""
        if not self.case:
            return tiny_model(demo_model, folder)
        if self.drafts:
            save_tiny_drafting(self.case, folder, max_position_embeddings=CONTEXT, **self.settings)
            return add_chat_tokenizer(demo_model, answering_with(folder, range(100, 103)))
        shape = {"num_hidden_layers": 4, "head_dim": 32, "max_position_embeddings": CONTEXT}
        return save_tiny_chat_family(demo_model, self.case, folder, **shape, **self.settings)


@dataclass(frozen=True)
class Saved:
    """A model that is saved, and what the whole contexts of a node have of its cache."""

    model: MatrixModel
    folder: Path
    block_bytes: int
    blocks: int


def saved(model: MatrixModel, demo_model: Path, folder: Path) -> Saved:
    model.save(demo_model, folder)
    groups = group_sizes(read_decoder_config(folder), ITEM_BYTES[Dtype.FP32], BLOCK_SIZE)
    load = Load(MAX_REQUESTS, STEP_TOKENS, CONTEXT)
    blocks, *_ = group_blocks(groups, BLOCK_SIZE, model.kv_cache_mib * MIB, load)
    return Saved(model, folder, groups[0].block_bytes, blocks)


LLAMA = MatrixModel("llama", 6)
MODELS = {
    model.name: model
    for model in (
        LLAMA,
        MatrixModel("hybrid", 6, "qwen3-next", _HYBRID),
        MatrixModel("windowed", 5, "gemma2", _WINDOWED),
        MatrixModel("gpt-oss", 5, "gpt-oss", _WINDOWED),
        MatrixModel("drafting", 1, "deepseek-v3", drafts=True),
    )
}
