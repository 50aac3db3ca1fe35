"""Imports torch without the part that answers for tensors without memory, a quarter of the time that torch takes.

torch imports that part (``torch._meta_registrations``: Python functions that tell the shapes of results) at its end,
for compilers and for modules that are built without memory. An engine computes with memory from the beginning. Whoever
needs the part later imports it, and gets it: nothing stays in its place. It has to come before anything that imports
it in its turn (``torch._dynamo``, ``torch._decomp`` and so all models and quantisers of transformers): these modules
import each other in a circle, which can only be entered here. So ``hf_decoder`` and ``fallback_config``, which import
these parts of transformers, import this part first. ``tests/models/test_lean_torch.py`` imports every module of an
engine before all others.

Where NVIDIA's bindings for Python (``cuda``) are installed, torch imports them too, a twentieth of the rest, for names
that it can give the kernels of a CUDA graph. Without them it has no such names. Others may import them afterwards.
"""

from __future__ import annotations

import sys
from types import ModuleType

_PART = "torch._meta_registrations"
_BINDINGS = "cuda"


def import_torch() -> None:
    """Imports torch, if nobody has. Must not run while another thread imports torch."""
    if "torch" in sys.modules:
        return
    sys.modules[_PART] = stand_in = ModuleType(_PART)
    hidden = _BINDINGS not in sys.modules
    if hidden:
        # As the import system has it, an import of it fails.
        sys.modules[_BINDINGS] = None  # type: ignore[assignment]
    try:
        import torch
    finally:
        if hidden:
            del sys.modules[_BINDINGS]
        if sys.modules.get(_PART) is stand_in:
            del sys.modules[_PART]
    # torch keeps it under its name, where an import would not look for the module again.
    if vars(torch).get("_meta_registrations") is stand_in:
        del torch._meta_registrations
