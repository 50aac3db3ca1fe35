"""The device where the kernels under test run, and how close their results must be to the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from pdserve_kernels.triton.fp8_products import multiplies_fp8

CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
PRODUCT_DTYPES = st.sampled_from(
    # The interpreter multiplies the bits of bf16 matrices as if they were integers.
    [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
)
NEEDS_FP8 = pytest.mark.skipif(
    DEVICE.type == "cuda" and not multiplies_fp8(DEVICE), reason="this GPU multiplies no FP8"
)
SEEDS = st.integers(0, 2**32 - 1)


def examples(on_a_gpu: int) -> int:
    """Returns the number of random cases: a sixth of them in the interpreter, where one takes up to half a second."""
    return on_a_gpu if DEVICE.type == "cuda" else on_a_gpu // 6


RELATIVE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(got: torch.Tensor, wanted: torch.Tensor, steps: float = 1.0) -> None:
    """Checks that two results differ by no more than ``steps`` roundings of their dtype."""
    assert got.dtype == wanted.dtype
    tolerance = RELATIVE[wanted.dtype] * steps
    torch.testing.assert_close(got.cpu().float(), wanted.float(), rtol=tolerance, atol=tolerance)
