"""One step of the softmax that never sees all scores at once (Milakov and Gimelshein, 2018; Dao et al., 2022)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_step(scores, highest, total, acc):
    """Scores ``[rows, tokens]`` in units of log 2, hidden ones -inf; ``highest``, ``total`` and ``acc`` so far.

    Returns the weights of these tokens and the three, rescaled to the new highest score. A row that has seen nothing
    but hidden tokens keeps -inf, 0 and 0.
    """
    risen = tl.maximum(highest, tl.max(scores, 1))
    # -inf minus -inf would be NaN.
    reference = tl.where(risen == float("-inf"), 0.0, risen)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(highest - reference)
    return weights, risen, total * shrink + tl.sum(weights, 1), acc * shrink[:, None]
