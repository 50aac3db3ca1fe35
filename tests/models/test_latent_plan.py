"""Tests that a row's latent attention is the same by latents as they are kept, and by keys and values of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.models import block_plan, latent_plan
from pdserve.models.block_plan import HeadBlockStep
from pdserve.models.latent_plan import is_expanded
from pdserve.models.recipe import LatentRecipe, Norm
from pdserve.models.runner import ModelRunner, StepRow
from tests.models.greedy import small_runner
from tests.models.test_families import PROMPT
from tests.models.tiny_families import save_tiny

DEEPSEEK = LatentRecipe(rank=512, plain=128, turned=64, value=128, norm=Norm(1e-6))


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Returns the logits of a prompt in two parts, the second of which shares its step with a single token."""
    pieces: list[torch.Tensor] = []
    runner.run([StepRow(PROMPT[:17], 0, range(16), True, range(17))], score=pieces.append)
    runner.run([StepRow(PROMPT[:5], 0, range(16, 32), True, range(5))], score=pieces.append)
    rows = [
        StepRow(PROMPT[5:6], 5, range(16, 32), True, range(1)),
        StepRow(PROMPT[17:], 17, range(16), True, range(len(PROMPT) - 17)),
    ]
    runner.run(rows, score=pieces.append)
    return torch.cat(pieces)


@pytest.mark.parametrize("case", ["deepseek-v3", "hy4-yarn", "minicpm3"])
def test_expanded_contexts_give_the_logits_of_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    folder, asked = save_tiny(case, tmp_path), list[bool]()

    def noted(latent: LatentRecipe, new_tokens: int, context: int) -> bool:
        asked.append(is_expanded(latent, new_tokens, context))
        return asked[-1]

    monkeypatch.setattr(latent_plan, "LEAST_EXPANDED", 2)
    monkeypatch.setattr(latent_plan, "is_expanded", noted)
    together = logits_of(small_runner(folder))
    assert asked == [True, True, False, True]
    # Each head's keys and values by themselves.
    monkeypatch.setattr(latent_plan, "EXPANDED_BYTES", 1)
    apart = logits_of(small_runner(folder))
    monkeypatch.setattr(latent_plan, "is_expanded", lambda *_: False)
    kept = logits_of(small_runner(folder))
    most = 1e-5 * float(kept.abs().max())
    torch.testing.assert_close(together, kept, rtol=0, atol=most)
    torch.testing.assert_close(apart, kept, rtol=0, atol=most)


def test_released_files_of_a_x_k1_lack_corrections_and_have_norms_that_nothing_reads(tmp_path: Path) -> None:
    folder = save_tiny("axk1", tmp_path)
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "correction" not in name}
    tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(60)
    save_file(tensors, file, {"format": "pt"})
    runner = small_runner(folder)
    assert runner.run([StepRow(PROMPT, 0, range(16), True)]).isfinite().all()


@pytest.mark.parametrize(
    ("new_tokens", "context", "expanded"),
    [
        (1, 1, False),
        (1, 100_000, False),
        (31, 31, False),
        (32, 32, True),
        (512, 512, True),
        (16, 8192, False),
        (512, 8192, True),
    ],
)
def test_rows_with_many_tokens_expand_their_contexts(new_tokens: int, context: int, expanded: bool) -> None:
    assert is_expanded(DEEPSEEK, new_tokens, context) == expanded


@pytest.mark.nightly
def test_blocks_are_chosen_and_gathered_for_some_tokens_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rooms = save_tiny("minimax-m3", tmp_path), list[int]()
    wanted = logits_of(small_runner(folder))
    monkeypatch.setattr(block_plan, "GATHERED_NUMBERS", 5000)
    monkeypatch.setattr(block_plan, "SCORES_AT_ONCE", 500)
    attended = HeadBlockStep._attended

    def counted(step: HeadBlockStep, layer: int, query: torch.Tensor, *others: Any) -> torch.Tensor:
        rooms.append(len(query))
        return attended(step, layer, query, *others)

    monkeypatch.setattr(HeadBlockStep, "_attended", counted)
    torch.testing.assert_close(logits_of(small_runner(folder)), wanted, rtol=1e-4, atol=1e-4)
    # Of 41 tokens, 9 attend to all before them, in two layers.
    assert sum(rooms) == 2 * 32
    assert max(rooms) < 8
