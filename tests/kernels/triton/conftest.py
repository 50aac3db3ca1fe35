"""These tests need a GPU or Triton's interpreter, which must be chosen before triton is first imported.

``tests/kernels/test_triton_interpreter.py`` runs this folder in a process of its own with ``TRITON_INTERPRET=1``. Where
there is a GPU, pytest also collects these tests and runs them there.
"""

from __future__ import annotations

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
