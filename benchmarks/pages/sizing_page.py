"""Writes the two tables of sizing.md: ``python -m benchmarks.pages.sizing_page``.

The bytes of a token's KV cache are what ``pdserve plan profile`` reckons with: ``cache_geometry`` of a ``config.json``.
How many contexts a cache with windows holds is counted as an engine divides its memory (``group_blocks``).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages.page_part import markdown_table, with_part
from pdserve.bench.plan.profiling import cache_geometry
from pdserve.config.bench import PlanProfileConfig
from pdserve.machine.memory import MIB
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.layer_groups import GroupSize, Load, group_blocks, group_sizes
from pdserve.plan.memory import requests_at_once
from pdserve.settings import load
from pdserve.wire.cache_groups import Keep

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "sizing.md"
BEGIN = "<!-- written by benchmarks/pages/sizing_page.py -->"
CONTEXT = 4096
"""Tokens of the request that the table is about."""
GPU_BYTES = 0.9 * 80e9
GBIT_PER_S = (10, 100)
BF16_BYTES = 2
WINDOWS_BEGIN = "<!-- written by benchmarks/pages/sizing_page.py: windows -->"
CACHE_MIB = 16 * 1024
BLOCK_SIZE = 16
LOAD = Load(requests=64, step_tokens=2048, context=32_768, asked=32_768)
"""What the caches of the second table are made for."""


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


WINDOWED = (
    _published(
        "Gemma-2-9B",
        *(9.24, "gemma2", 3584, 14336, 42, 16, 8, 256, 256000),
        sliding_window=4096,
        max_position_embeddings=LOAD.context,
    ),
    _published(
        "gpt-oss-20b",
        *(20.9, "gpt_oss", 2880, 2880, 24, 64, 8, 64, 201088),
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
    _published(
        "Command R7B",
        *(8.03, "cohere2", 4096, 14336, 32, 32, 8, 128, 256000),
        sliding_window=4096,
        sliding_window_pattern=4,
    ),
    next(model for model in MODELS if model.name.startswith("Gemma-3-12B")),
)
"""Models of which some layers have a window. The context of Gemma 2 is made as long as the others'."""


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


def contexts_that_fit(model: Published) -> tuple[int, int]:
    """Returns how many contexts of ``LOAD`` fit into ``CACHE_MIB`` if all layers keep them whole, and with windows."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.config))
        config = read_family_config(Path(folder))
    sizes = group_sizes(config, BF16_BYTES, BLOCK_SIZE)
    one = [GroupSize(Keep.ALL, sum(size.block_bytes for size in sizes))]
    whole, windowed = (
        requests_at_once(groups, group_blocks(groups, BLOCK_SIZE, CACHE_MIB * MIB, LOAD), BLOCK_SIZE, LOAD)
        for groups in (one, sizes)
    )
    return whole, windowed


def windows_table() -> str:
    """Returns the table of models with windows as Markdown."""
    rows = []
    for model in WINDOWED:
        (whole, windowed), config = contexts_that_fit(model), size(model).config
        windows = [part.window for part in config.recipe.attention if part.window is not None]
        layers = f"{len(windows)} of {config.num_layers}, {windows[0]:,} tokens"
        rows.append([model.name, layers, str(whole), str(windowed), f"{windowed / whole:.2f}"])
    head = ["model", "layers with a window", "contexts if all layers keep them whole", "contexts", "times as many"]
    return markdown_table(head, rows)


def page_with(text: str) -> str:
    """Returns the page's ``text`` with its tables."""
    return with_part(with_part(text, BEGIN, table()), WINDOWS_BEGIN, windows_table())


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text()))
