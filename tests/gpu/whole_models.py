"""Times random models of the shapes that people serve on GPUs: ``python -m tests.gpu.whole_models --json FILE``.

gpt-oss-20b as it is, the width of DeepSeek V3 with its first four layers, one of which has experts, and that of
Qwen3-30B-A3B with eight layers. Their files take up to 17 GB of disk, one after the other.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.random_llama import QUANTISATION, Stored, filled, random_tensors, write_shards
from pdserve.bench.engine.benchmark import open_bench, subject_rows
from pdserve.bench.engine.subject import Steps, open_subject
from pdserve.bench.report import Report, Row, chip_name, this_machine, to_json
from pdserve.config import Device, ModelConfig
from pdserve.config.bench import BenchEngineConfig, EngineBenchConfig
from pdserve_kernels.contract import Kernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels

Shape = Mapping[str, int]
Tensors = dict[str, torch.Tensor]
STEPS = Steps(batches=(1, 16, 64), contexts=(1024,), chunks=(4096,))
_PATTERN = 2**20 + 7
_MXFP4 = 32
"""The numbers that have one scale."""
_EXPONENT = 120
"""The scale is 2 ** -7: the numbers of a weight have a deviation of some 0.02."""


@dataclass(frozen=True)
class WholeModel:
    """A family with the numbers of a shape, and the tensors of its files."""

    name: str
    shape: Shape
    settings: Mapping[str, object]
    """What else its ``config.json`` says."""
    layer: Callable[[Shape, int], Tensors]

    def write(self, folder: Path) -> None:
        hidden, vocab = self.shape["hidden_size"], self.shape["vocab_size"]
        ends = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}

        def shards() -> Iterator[Tensors]:
            yield random_tensors(_all({**ends, "model.norm.weight": (hidden,)}, Stored.BF16))
            for index in range(self.shape["num_hidden_layers"]):
                made = self.layer(self.shape, index)
                yield {f"model.layers.{index}.{name}": tensor for name, tensor in made.items()}

        config = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2}
        write_shards({**config, **self.shape, **self.settings}, shards(), folder)

    def rows(self, config: BenchEngineConfig, steps: Steps, cpu_kernels: Callable[[], Kernels]) -> list[Row]:
        with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as made:
            self.write(Path(made))
            subject = open_subject(self.name, Path(made), config.model, config.engine.block_size, steps, cpu_kernels)
        return list(subject_rows(open_bench(subject, config.engine), steps))


def _all(sizes: Mapping[str, tuple[int, ...]], stored: Stored) -> dict[str, tuple[tuple[int, ...], Stored]]:
    return {name: (size, stored) for name, size in sizes.items()}


def _norms(shape: Shape) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (shape["hidden_size"],))


def _heads(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, head = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _experts(shape: Shape, count: int) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {}
    for expert in range(count):
        sizes |= _mlp(f"mlp.experts.{expert}", shape["hidden_size"], shape["moe_intermediate_size"])
    return sizes


def _qwen3_moe(shape: Shape, _: int) -> Tensors:
    sizes = {**_norms(shape), **_heads(shape), **_experts(shape, shape["num_experts"])}
    sizes |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (shape["head_dim"],))
    sizes["mlp.gate.weight"] = (shape["num_experts"], shape["hidden_size"])
    return random_tensors(_all(sizes, Stored.BF16))


def _deepseek_v3(shape: Shape, index: int) -> Tensors:
    hidden, heads, rank, count = (
        shape[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank", "n_routed_experts")
    )
    plain, turned, value = (shape[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    quantised: dict[str, tuple[int, ...]] = {
        "self_attn.q_a_proj.weight": (shape["q_lora_rank"], hidden),
        "self_attn.q_b_proj.weight": (heads * (plain + turned), shape["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa.weight": (rank + turned, hidden),
        "self_attn.kv_b_proj.weight": (heads * (plain + value), rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    sizes = {**_norms(shape), "self_attn.q_a_layernorm.weight": (shape["q_lora_rank"],)}
    sizes["self_attn.kv_a_layernorm.weight"] = (rank,)
    if index < shape["first_k_dense_replace"]:
        quantised |= _mlp("mlp", hidden, shape["intermediate_size"])
    else:
        quantised |= _experts(shape, count) | _mlp("mlp.shared_experts", hidden, shape["moe_intermediate_size"])
        sizes |= {"mlp.gate.weight": (count, hidden), "mlp.gate.e_score_correction_bias": (count,)}
    return random_tensors(_all(quantised, Stored.FP8) | _all(sizes, Stored.BF16))


def _gpt_oss(shape: Shape, _: int) -> Tensors:
    hidden, inner, count = shape["hidden_size"], shape["intermediate_size"], shape["num_local_experts"]
    heads = _heads(shape)
    sizes = {**_norms(shape), **heads, "self_attn.sinks": (shape["num_attention_heads"],)}
    sizes |= {"mlp.router.weight": (count, hidden), "mlp.router.bias": (count,)}
    sizes |= {name.replace("weight", "bias"): size[:1] for name, size in heads.items()}
    made = random_tensors(_all(sizes, Stored.BF16))
    numbers = torch.randint(0, 256, (_PATTERN,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        groups = (count, outputs, inputs // _MXFP4)
        made[f"mlp.experts.{name}_blocks"] = filled(numbers, (*groups, _MXFP4 // 2))
        made[f"mlp.experts.{name}_scales"] = torch.full(groups, _EXPONENT, dtype=torch.uint8)
        made[f"mlp.experts.{name}_bias"] = torch.zeros(count, outputs, dtype=torch.bfloat16)
    return made


GPT_OSS_20B = WholeModel(
    "gpt-oss-20b-shaped",
    {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201_088,
        "sliding_window": 128,
    },
    {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    _gpt_oss,
)
DEEPSEEK_V3 = WholeModel(
    "4 layers DeepSeek-V3-shaped",
    {
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 129_280,
    },
    {"model_type": "deepseek_v3", "quantization_config": QUANTISATION[Stored.FP8]},
    _deepseek_v3,
)
QWEN3_30B = WholeModel(
    "8 layers Qwen3-30B-A3B-shaped",
    {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151_936,
    },
    {"model_type": "qwen3_moe", "norm_topk_prob": True},
    _qwen3_moe,
)
WHOLE_MODELS = (GPT_OSS_20B, DEEPSEEK_V3, QWEN3_30B)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    chosen = parser.parse_args()
    config = BenchEngineConfig(
        engine=EngineBenchConfig(seconds=0.5, copy_mib=4096), model=ModelConfig(device=Device.CUDA)
    )
    rows: list[Row] = []
    for model in WHOLE_MODELS:
        rows += model.rows(config, STEPS, TorchKernels)
        # What one model leaves behind is taken for another's.
        torch.cuda.empty_cache()
        chosen.json.write_bytes(to_json(Report("engine", this_machine(chip_name()), {}, (), tuple(rows))))


if __name__ == "__main__":
    main()
