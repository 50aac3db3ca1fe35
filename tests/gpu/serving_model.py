"""``python -m tests.gpu.serving_model FOLDER`` writes a random 8B-shaped model that a node can serve.

It has the tokenizer of the demo model, and a vocabulary of that size.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.random_llama import LLAMA_8B, write_random_model
from pdserve.models.checkpoint.cached_tokenizer import gguf_tokenizer
from pdserve.models.checkpoint.model_files import packaged_gguf


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    tokenizer = gguf_tokenizer(packaged_gguf())
    write_random_model(replace(LLAMA_8B, vocab_size=len(tokenizer)), folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
