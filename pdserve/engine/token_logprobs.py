"""Log probabilities of chosen tokens and of the likeliest ones, by the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.wire.sampling import TokenLogprobs


def token_logprobs(logits: torch.Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of ``logits`` (fp32 ``[rows, vocab_size]``) its chosen token and the ``counts[row]`` likeliest.

    Equally likely tokens come in the order of their ids, so that the answer depends on neither device nor batch.
    """
    column = torch.tensor(chosen, device=logits.device).unsqueeze(1)
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, column)
    ranks = (logits > own).sum(-1) + 1
    likeliest = _likeliest(logits, normaliser, counts)
    own_logprobs = (own - normaliser).squeeze(1)
    return [
        TokenLogprobs(logprob, rank, tuple(top))
        for logprob, rank, top in zip(own_logprobs.tolist(), ranks.tolist(), likeliest, strict=True)
    ]


def _likeliest(logits: torch.Tensor, normaliser: torch.Tensor, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    found: list[list[tuple[int, float]]] = [[] for _ in counts]
    wanted = [min(count, logits.shape[-1]) for count in counts]
    if not any(wanted):
        return found
    best = logits.topk(max(wanted)).values
    last = torch.tensor([max(count - 1, 0) for count in wanted], device=logits.device).unsqueeze(1)
    # Which of several equal tokens topk takes is not said: all are looked at.
    row, token = (logits >= best.gather(1, last)).nonzero(as_tuple=True)
    logprobs = (logits - normaliser)[row, token]
    for at, token_id, logprob in zip(row.tolist(), token.tolist(), logprobs.tolist(), strict=True):
        found[at].append((token_id, logprob))
    return [
        sorted(tokens, key=lambda pair: (-pair[1], pair[0]))[:count]
        for tokens, count in zip(found, wanted, strict=True)
    ]
