"""These tests need a GPU. ``tests/kernels/triton`` also runs on a GPU where there is one."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
elif torch.cuda.device_count() < 2:
    collect_ignore_glob = ["test_two_gpus.py"]
