"""Tests that an engine's torch lacks what it never uses, and that whatever needs that later gets it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pdserve.models.lean_torch import import_torch
import_torch()
import torch
print("torch._meta_registrations" in sys.modules, hasattr(torch, "_meta_registrations"))
print((torch.ones(2, 3) @ torch.ones(3, 2)).tolist())
import torch._meta_registrations
print(torch.linalg.inv_ex(torch.empty(2, 2, device="meta")).inverse.shape)
"""


@pytest.mark.integration
def test_the_part_for_tensors_without_memory_comes_when_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False False", "[[3.0, 3.0], [3.0, 3.0]]", "torch.Size([2, 2])"]
