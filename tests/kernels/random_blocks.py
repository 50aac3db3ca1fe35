"""Makes random weights in blocks of every format."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pdserve_kernels.contract import BlockFormat, BlockWeight

HALVES = {
    BlockFormat.Q4_0: (0,),
    BlockFormat.Q4_1: (0, 2),
    BlockFormat.Q5_0: (0,),
    BlockFormat.Q5_1: (0, 2),
    BlockFormat.Q8_0: (0,),
    BlockFormat.Q4_K: (0, 2),
    BlockFormat.Q5_K: (0, 2),
    BlockFormat.Q6_K: (208,),
    BlockFormat.IQ4_NL: (0,),
    BlockFormat.IQ4_XS: (0,),
    BlockFormat.MXFP4: (),
}
"""Where a block has 16-bit floating-point numbers. All of its other bytes may be anything."""


def random_blocks(kind: BlockFormat, outer: int, inner: int, seed: int) -> BlockWeight:
    """Returns a weight ``[outer, inner]`` whose scales are normal, subnormal, zero and negative numbers."""
    random = np.random.default_rng(seed)
    count = inner // kind.elements
    blocks = random.integers(0, 256, (outer, count, kind.block_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = random.normal(size=(outer, count)) * 10.0 ** random.integers(-7, 0, (outer, count))
        scales[random.random((outer, count)) < 0.1] = 0
        blocks[..., at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(outer, count, 2)
    if kind is BlockFormat.MXFP4:
        # An exponent, of which the largest one stands for no number.
        blocks[..., 0] = random.integers(100, 140, (outer, count))
    return BlockWeight(kind, torch.from_numpy(blocks.reshape(outer, -1)))


def dequantised(weight: BlockWeight) -> torch.Tensor:
    """Returns the fp32 values that the ``gguf`` package reads from the blocks."""
    plain = dequantize(weight.blocks.numpy(), GGMLQuantizationType(int(weight.format)))
    return torch.from_numpy(plain.astype(np.float32))
