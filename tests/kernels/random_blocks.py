"""Makes random weights in blocks of every format."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pdserve_kernels.contract import BLOCK_FORMATS, BlockFormat, BlockWeight

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
    **dict.fromkeys((BlockFormat.FP8, BlockFormat.FP8_SHORT, BlockFormat.NVFP4, BlockFormat.Q8_OFFSET), ()),
}
"""Where a block has 16-bit floating-point numbers. All of its other bytes may be anything."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The numbers of four bits."""


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
    if kind not in BLOCK_FORMATS:
        _scale(kind, blocks, random)
    return BlockWeight(kind, torch.from_numpy(blocks.reshape(outer, -1)))


def _scale(kind: BlockFormat, blocks: np.ndarray, random: np.random.Generator) -> None:
    """Gives blocks of a GPU's own formats fp32 scales, and no code that stands for no number."""
    outer, count, _ = blocks.shape
    scales = (random.normal(size=(outer, count, 2)) * 10.0 ** random.integers(-7, 0, (outer, count, 2))).astype("f4")
    if kind is BlockFormat.NVFP4:
        scales = np.repeat(scales[:, :1], count, axis=1)
    # In NVFP4 the scales are such codes, and its numbers may be anything.
    codes = slice(4, 6) if kind is BlockFormat.NVFP4 else slice(4, None)
    blocks[..., codes] = np.where(blocks[..., codes] & 127 == 127, 0, blocks[..., codes])
    blocks[..., :4] = scales[..., :1].copy().view(np.uint8)
    if kind is BlockFormat.Q8_OFFSET:
        blocks[..., 4:8] = scales[..., 1:].copy().view(np.uint8)


def _of_a_gpu(weight: BlockWeight) -> torch.Tensor:
    """Returns the fp32 values of a format that GGUF files do not have."""
    kind = weight.format
    blocks = weight.blocks.reshape(len(weight.blocks), -1, kind.block_bytes)
    scale = blocks[..., :4].contiguous().view(torch.float32)
    if kind is BlockFormat.Q8_OFFSET:
        return (blocks[..., 8:].float() * scale + blocks[..., 4:8].contiguous().view(torch.float32)).flatten(1)
    if kind is BlockFormat.NVFP4:
        halves = torch.stack((blocks[..., 6:] & 15, blocks[..., 6:] >> 4), -2).long()
        own = blocks[..., 4:6].contiguous().view(torch.float8_e4m3fn).float() * scale
        return (E2M1[halves] * own.unsqueeze(-1)).flatten(1)
    return (blocks[..., 4:].contiguous().view(torch.float8_e4m3fn).float() * scale).flatten(1)


def dequantised(weight: BlockWeight) -> torch.Tensor:
    """Returns the fp32 values that the ``gguf`` package reads from the blocks, or those of a GPU's own formats."""
    if weight.format not in BLOCK_FORMATS:
        return _of_a_gpu(weight)
    plain = dequantize(weight.blocks.numpy(), GGMLQuantizationType(int(weight.format)))
    return torch.from_numpy(plain.astype(np.float32))
