"""Writes the table of ten models in sizing.md: ``python -m benchmarks.pages.sizing_page``.

The bytes of a token's KV cache are what ``pdserve plan profile`` reckons with: ``cache_geometry`` of a ``config.json``.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages.page_part import markdown_table, with_part
from pdserve.bench.plan.profiling import cache_geometry
from pdserve.config.bench import PlanProfileConfig
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.settings import load

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "sizing.md"
BEGIN = "<!-- written by benchmarks/pages/sizing_page.py -->"
CONTEXT = 4096
"""Tokens of the request that the table is about."""
GPU_BYTES = 0.9 * 80e9
GBIT_PER_S = (10, 100)
BF16_BYTES = 2


@dataclass(frozen=True)
class Published:
    """A model's published ``config.json``, as far as it says how large the model and its KV cache are."""

    name: str
    parameters: float
    """The number that the model's page states, in billions."""
    config: dict[str, object]


def _published(
    name: str,
    parameters: float,
    family: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    tied: bool = False,
    **others: object,
) -> Published:
    config = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return Published(name, parameters, config | others)


MODELS = (
    _published("Qwen3-0.6B", 0.6, "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    _published("Llama-3.2-1B", 1.24, "llama", 2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    _published("Mistral-7B-v0.3", 7.25, "mistral", 4096, 14336, 32, 32, 8, 128, 32768, sliding_window=None),
    _published("Qwen2.5-7B", 7.62, "qwen2", 3584, 18944, 28, 28, 4, 128, 152064),
    _published("Llama-3.1-8B", 8.03, "llama", 4096, 14336, 32, 32, 8, 128, 128256),
    _published("Qwen3-8B", 8.19, "qwen3", 4096, 12288, 36, 32, 8, 128, 151936),
    _published(
        "Gemma-3-12B, text part",
        11.8,
        "gemma3_text",
        *(3840, 15360, 48, 16, 8, 256, 262208),
        tied=True,
        sliding_window=1024,
    ),
    _published(
        "Qwen3-30B-A3B",
        30.5,
        "qwen3_moe",
        2048,
        6144,
        48,
        32,
        4,
        128,
        151936,
        num_experts=128,
        moe_intermediate_size=768,
    ),
    _published("Qwen3-32B", 32.8, "qwen3", 5120, 25600, 64, 64, 8, 128, 151936),
    _published("Llama-3.3-70B", 70.6, "llama", 8192, 28672, 80, 64, 8, 128, 128256),
)


@dataclass(frozen=True)
class Size:
    """What a model takes in bf16."""

    config: FamilyConfig
    kv_bytes: int
    """The bytes of one token's KV cache on all ranks together, in layers that see everything."""
    window_bytes: int
    """Those of one request's windows."""
    weights: int
    """The number of weights."""


def size(model: Published) -> Size:
    """Returns what a model takes, as pdserve reads its ``config.json``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.config))
        profile = load(PlanProfileConfig, [], {}, prog="pdserve plan profile")
        geometry, config = cache_geometry(profile, Path(folder)), read_family_config(Path(folder))
    return Size(config, geometry.block_bytes // geometry.block_size, geometry.prompt_bytes, weights(config))


def weights(config: FamilyConfig) -> int:
    """Returns the number of weights without those of norms and biases, which are less than a thousandth."""
    attention = config.hidden_size * config.head_dim * 2 * (config.heads + config.kv_heads)
    inner = config.intermediate_size
    router = 0
    if config.experts is not None:
        inner = config.experts.count * config.experts.expert.channels
        router = config.hidden_size * config.experts.count
    layer = attention + 3 * config.hidden_size * inner + router
    embeddings = config.vocab_size * config.hidden_size * (1 if config.recipe.tied else 2)
    return config.num_layers * layer + embeddings


def table() -> str:
    """Returns the table as Markdown."""
    rows = []
    for model in MODELS:
        found = size(model)
        config, request = found.config, found.kv_bytes * CONTEXT + found.window_bytes
        free_bytes = GPU_BYTES - found.weights * BF16_BYTES
        rows.append(
            [
                model.name,
                f"{config.num_layers} × {config.kv_heads} × {config.head_dim}",
                f"{found.kv_bytes / 1024:g} KiB",
                f"{found.weights * BF16_BYTES / 1e9:.1f} GB",
                f"{request / 1e9:.2f} GB",
                f"{free_bytes / request:.0f}" if free_bytes > 0 else "none: several ranks",
                " / ".join(f"{1e3 * request / (rate * 1e9 / 8):,.0f} ms" for rate in GBIT_PER_S),
            ]
        )
    rates = " / ".join(f"{rate}" for rate in GBIT_PER_S)
    head = [
        "model",
        "layers × KV heads × head size",
        "KV cache of a token",
        "weights",
        f"KV cache of {CONTEXT:,} tokens",
    ]
    head += [f"requests of {CONTEXT:,} tokens on a GPU of 80 GB", f"time to move one over {rates} Gbit/s"]
    return markdown_table(head, rows)


def page_with(text: str) -> str:
    """Returns the page's ``text`` with its table."""
    return with_part(text, BEGIN, table())


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text()))
