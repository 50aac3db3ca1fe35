"""Small random models of every supported family, as ordinary Hugging Face folders, and their reference answers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitNetConfig,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MellumConfig,
    MistralConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 512
NEAR_TIE = 1e-3
"""Two logits that differ by less of the largest one count as equal; comparisons of logits allow a fifth of it."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # With this range, the logits of a random model differ far more than rounding does.
    "initializer_range": 0.4,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = 5
"""The window is so small that the tests' contexts are longer."""
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-scaled": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=WINDOW),
    # The first layer sees the whole context, the others a window.
    "qwen2-window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3-window": Qwen3Config(
        **SHAPE,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    # Two layers have experts, one has none.
    "qwen3-moe": Qwen3MoeConfig(
        **SHAPE,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3-moe-sparse": Qwen3MoeConfig(
        **SHAPE,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=17,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": LINEAR},
    ),
}

OTHERS: dict[str, PretrainedConfig] = {
    # A GGUF file can describe this shape: scores scaled by the head size, and every sixth layer with the whole context.
    "gemma3-pattern": Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 7},
        sliding_window=WINDOW,
        query_pre_attn_scalar=10,
        rope_parameters={"full_attention": LINEAR},
    ),
    "gemma3-images": Gemma3Config(
        text_config=SHAPE | {"sliding_window": WINDOW, "query_pre_attn_scalar": 17},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    ),
}

_WITHOUT_HEAD_SIZE = {name: value for name, value in SHAPE.items() if name != "head_dim"}
FALLBACK: dict[str, PretrainedConfig] = {
    "bitnet": BitNetConfig(**_WITHOUT_HEAD_SIZE),
    "phimoe": PhimoeConfig(**_WITHOUT_HEAD_SIZE, num_local_experts=4, num_experts_per_tok=2),
    "mellum": MellumConfig(
        **SHAPE,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense"] * 3,
    ),
}
"""A dense model, one with experts, and one with windows. None has a recipe: transformers computes them."""


def random_prompt(length: int, seed: int | str = 0) -> list[int]:
    """Returns token ids of these models' vocabulary, always the same ones, none of which is special."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def save_tiny_chat_model(tokenizer: Path, folder: Path, family: str = "llama", /, **shape: int) -> Path:
    """Saves a random model that a node can serve, with the chat template in the folder ``tokenizer``, and that folder's
    tokenizer as far as the model has its tokens."""
    save_tiny_model(family, folder, **shape)
    return add_chat_tokenizer(tokenizer, folder)


def add_chat_tokenizer(tokenizer: Path, folder: Path) -> Path:
    """Gives the model in ``folder`` a chat template, and as many tokens of a tokenizer as it knows. Returns ``folder``.

    Each engine reads the vocabulary when it starts: one of 49,152 tokens takes a fifth of the whole start.
    """
    for path in (*tokenizer.glob("*token*.json"), *tokenizer.glob("chat_template*")):
        shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    known = config.get("text_config", config)["vocab_size"]
    whole = folder / "tokenizer.json"
    content = json.loads(whole.read_text(encoding="utf-8"))
    pairs = content["model"]
    # Special tokens and bytes come first, and then each pair's token, in the order of the pairs.
    others = len(pairs["vocab"]) - len(pairs["merges"])
    if known < len(pairs["vocab"]):
        pairs["vocab"] = {token: number for token, number in pairs["vocab"].items() if number < known}
        pairs["merges"] = pairs["merges"][: known - others]
        whole.write_text(json.dumps(content), encoding="utf-8")
    return folder


def save_tiny_model(family: str, folder: Path, **shape: int) -> Path:
    """Saves a random model of ``family`` in ``folder``, always the same one. ``shape`` overrides ``SHAPE``."""
    torch.manual_seed(sum(family.encode()))
    auto: Any = AutoModelForCausalLM
    config = (FAMILIES | OTHERS | FALLBACK)[family]
    config = type(config).from_dict(config.to_dict() | shape)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if config.model_type in ("gemma3", "gemma3_text"):
        shrink_embeddings(model)
    model.save_pretrained(folder)
    return folder


def shrink_embeddings(model: PreTrainedModel) -> None:
    """Has what the layers add count beside the token that is read.

    Otherwise a model whose head is its embedding says the token that it reads again and again.
    """
    embeddings: Any = model.get_input_embeddings()
    embeddings.weight.data *= 0.25


def reference_logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Returns the fp32 logits ``[tokens, vocab]`` of transformers."""
    return _logits(_reference(folder), token_ids)


def logits_of(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Returns the logits ``[tokens, vocab]`` of a model of transformers that is loaded."""
    return _logits(model.eval(), token_ids)


def reference_last_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Returns the fp32 logits ``[vocab]`` of transformers after the last token of each prompt."""
    model = _reference(folder)
    return [_logits(model, prompt)[-1] for prompt in prompts]


class Reference:
    """A model of transformers, which answers greedily, in fp32, with ``new_tokens`` tokens whatever they are."""

    def __init__(self, folder: Path, new_tokens: int) -> None:
        self._new_tokens = new_tokens
        self._model: Any = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)

    def answer(self, prompt: Sequence[int]) -> list[int]:
        return self._answer(prompt)[0]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the fp32 logits ``[tokens, vocab]``."""
        return _logits(self._model, token_ids)

    def clear_answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns each answer up to the first token that is hardly likelier than another: rounding may choose there.

        A third of the tokens are before such ones.
        """
        answers = []
        for prompt in prompts:
            tokens, margins = self._answer(prompt)
            answers.append(tokens[: next((at for at, margin in enumerate(margins) if margin < NEAR_TIE), len(tokens))])
        assert sum(map(len, answers)) >= self._new_tokens * len(prompts) / 3
        return answers

    @torch.inference_mode()
    def _answer(self, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        """Returns the tokens, and by how much of the largest logit each is likelier than the second one."""
        ids = torch.tensor([list(prompt)])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._new_tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=2,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(out.logits)
        best, second = logits.topk(2).values.T
        margins: list[float] = ((best - second) / logits.abs().amax(1)).tolist()
        tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
        return tokens, margins


def auto_class(config: PretrainedConfig) -> Any:
    """Returns the class that makes such models. A Mistral 4 is only among those that take images, too."""
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


def _reference(folder: Path) -> PreTrainedModel:
    auto = auto_class(AutoConfig.from_pretrained(folder))
    model: PreTrainedModel = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model


@torch.inference_mode()
def _logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits
