"""The accelerator that torch sees."""

from __future__ import annotations


def chip_name() -> str:
    """Empty where there is none."""
    # Seconds to load, and needed by the benchmarks of an engine alone.
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
