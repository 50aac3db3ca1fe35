"""Tests that a GGUF file of each architecture gives the logits and tokens of the checkpoint that it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.models.checkpoint.gguf_architectures import ARCHITECTURES
from pdserve.models.runner import StepRow
from tests.models.converted_gguf import CONVERTED, Converted, save_converted
from tests.models.greedy import greedy_tokens, small_runner
from tests.models.tiny_families import CASES, save_tiny
from tests.tiny_models import Reference, reference_logits, save_tiny_model

PROMPT = [(7 * i * i + 11 * i) % 509 + 3 for i in range(41)]
SINGLE = [(arch, converted) for arch, cases in sorted(CONVERTED.items()) for converted in cases]


def save(converted: Converted, folder: Path) -> Path:
    if converted.case in CASES:
        return save_tiny(converted.case, folder, **converted.changes)
    return save_tiny_model(converted.case, folder, **converted.changes)


@pytest.mark.parametrize(("arch", "converted"), SINGLE, ids=[f"{arch}-{each.case}" for arch, each in SINGLE])
def test_logits_and_tokens_are_those_of_the_checkpoint(tmp_path: Path, arch: str, converted: Converted) -> None:
    folder = save(converted, tmp_path / "folder")
    runner = small_runner(save_converted(folder, tmp_path / "tiny.gguf", arch))
    wanted = reference_logits(folder, PROMPT)
    pieces: list[torch.Tensor] = []
    runner.run([StepRow(PROMPT, 0, range(16), True, range(len(PROMPT)))], score=pieces.append)
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))
    assert greedy_tokens(runner, PROMPT, 8) == Reference(folder, 8).answer(PROMPT)


def test_every_architecture_has_a_case() -> None:
    assert set(ARCHITECTURES) - set(CONVERTED) == {"gemma3", "qwen2", "qwen3"}
