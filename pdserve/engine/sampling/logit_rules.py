"""Changes a request's logits by its parameters before a token is sampled.

The order is: repetition penalty, frequency and presence penalties, bias, then allowed and banned tokens. All rows are
changed together: their tokens are listed on the host, and each rule is one gather and one scatter on the device.

A row's last token may be on the device only, while the step that samples it is under way. Rules that depend on it
find it there: the host lists what follows from the tokens that it knows, and what changes if a token is the last one.

A grammar is a rule about allowed tokens. An end-of-sequence token that it allows needs not be among
``allowed_token_ids``. What it allows prevails over bans, as ``allowed_token_ids`` does: where a grammar lets an answer
do nothing but end, the answer ends before its ``min_tokens``, and in spite of ``ignore_eos``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.sampling.grammar_matcher import TokenBits
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve_kernels.host_copies import array_to_device

FORBIDDEN = float("-inf")


def has_own_rules(row: SamplingRow) -> bool:
    """Returns whether a row has rules beside its grammar."""
    return moves_logits(row) or closes_tokens(row)


def moves_logits(row: SamplingRow) -> bool:
    """Returns whether a row has penalties or biases."""
    sampling = row.sampling
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
        or bool(sampling.logit_bias)
    )


def closes_tokens(row: SamplingRow) -> bool:
    """Returns whether a row forbids tokens, apart from those that its grammar does."""
    sampling = row.sampling
    return (
        0 < sampling.min_tokens > row.position
        or bool(sampling.allowed_token_ids or sampling.bad_words)
        or (sampling.ignore_eos and sampling.grammar is not None)
    )


def needs_last_token(row: SamplingRow) -> bool:
    """Returns whether a row has rules, beside its grammar, for which the host has to know its last token."""
    words = row.sampling.bad_words
    return bool(words) and any(len(word) > 1 for word in words)


def apply_rules(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    eos_token_ids: Set[int],
    grammars: Mapping[int, TokenBits] | None = None,
    last: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the logits ``[rows, vocab_size]`` after the rows' parameters. ``logits`` itself may be changed, too.

    ``grammars`` has what ``grammar_bits`` returns for each row that has a grammar. ``last``, int64 ``[rows]``, has the
    last tokens of rows that have an unknown one. Does not wait for a GPU.
    """
    _penalise_repetition(logits, rows, last)
    _penalise_answer(logits, rows, last)
    _add(logits, _biases(rows))
    return _keep_open(logits, rows, eos_token_ids, grammars or {})


def grammar_bits(row: SamplingRow, vocab_size: int, eos_token_ids: Set[int], aside: bool = False) -> TokenBits | None:
    """Returns the tokens that a row's grammar and its other parameters leave, at least one.

    Returns None if they leave none; the matcher's ``failure`` then says why. Raises GrammarWaits as ``open_bits`` does.
    """
    matcher = row.matcher
    if matcher is None:
        return None
    bits = matcher.open_bits(row.token_ids[row.num_prompt_tokens :], vocab_size, aside)
    open_ids = row.sampling.allowed_token_ids
    if open_ids and matcher.failure is None:
        allowed = np.zeros(len(bits) * 8, np.bool_)
        allowed[_array(_Identity(open_ids))] = True
        allowed[[token for token in eos_token_ids if token < vocab_size]] = True
        bits &= np.packbits(allowed, bitorder="little")
        if not bits.any():
            matcher.failure = "none of 'allowed_token_ids' fits the grammar here"
    if matcher.failure is not None:
        return None
    banned = [token for token in _bans(row, eos_token_ids) if token < vocab_size]
    if banned:
        left = bits.copy()
        for token in banned:
            left[token // 8] &= ~(1 << token % 8) & 0xFF
        if left.any():
            return left
    return bits


class _Identity:
    """A request's token ids as a cache key by identity: to compare or hash them would take as long as to read them."""

    __slots__ = ("ids",)

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids

    def __hash__(self) -> int:
        return id(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.ids is other.ids


@lru_cache(maxsize=128)
def _array(given: _Identity) -> npt.NDArray[np.int64]:
    """Returns the ids as an array. To read 16,384 ids for each of 64 answers takes 40 ms of a step."""
    return np.asarray(given.ids, np.int64)


@dataclass(slots=True)
class _Entries:
    """A sparse matrix: some tokens of some rows, none of them twice, with a number for each."""

    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    tokens: list[npt.NDArray[np.int64]] = field(default_factory=list)
    values: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def add(self, row: int, tokens: npt.ArrayLike, values: npt.ArrayLike) -> None:
        ids = np.asarray(tokens, np.int64)
        self.rows.append(np.full(len(ids), row))
        self.tokens.append(ids)
        self.values.append(np.broadcast_to(np.asarray(values, np.float32), ids.shape))

    def place(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns rows, tokens and values on the device, each 1-D and of one length."""
        rows, tokens, values = (np.concatenate(part) for part in (self.rows, self.tokens, self.values))
        return tuple(array_to_device(part, device) for part in (rows, tokens, values))  # type: ignore[return-value]  # mypy does not count them


_LAST = -1
"""Stands for a row's last token where that is on the device only."""


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[SamplingRow], last: torch.Tensor | None) -> None:
    """Penalises tokens of prompt and answer, for logits of both signs, as transformers does (Keskar et al., 2019)."""
    entries = _Entries()
    for index, row in enumerate(rows):
        if row.sampling.repetition_penalty != 1.0:
            entries.add(index, row.counts.present(row.token_ids), row.sampling.repetition_penalty)
            if row.num_unknown_tokens:
                entries.add(index, [_LAST], row.sampling.repetition_penalty)
    if entries.rows:
        at_row, at_token, penalty = entries.place(logits.device)
        if last is not None:
            # A token that was there before is listed twice then, and gets the same value twice.
            at_token = torch.where(at_token == _LAST, last[at_row], at_token)
        found = logits[at_row, at_token]
        logits[at_row, at_token] = torch.where(found > 0, found / penalty, found * penalty)


def _penalise_answer(logits: torch.Tensor, rows: Sequence[SamplingRow], last: torch.Tensor | None) -> None:
    """Subtracts frequency and presence penalties of the answer's tokens."""
    entries = _Entries()
    for index, row in enumerate(rows):
        sampling = row.sampling
        if (sampling.frequency_penalty or sampling.presence_penalty) and row.position:
            entries.add(index, *row.counts.generated(row.token_ids, row.num_prompt_tokens))
            if row.num_unknown_tokens:
                entries.add(index, [_LAST], 0)
    if not entries.rows:
        return
    at_row, at_token, times = entries.place(logits.device)
    if last is not None:
        is_last, is_listed_twice = at_token == last[at_row], at_token == _LAST
        before = times.new_zeros(len(rows)).index_add_(0, at_row, times * is_last)
        times = torch.where(is_listed_twice, before[at_row], times) + (is_last | is_listed_twice)
        at_token = torch.where(is_listed_twice, last[at_row], at_token)
    penalties = [(row.sampling.frequency_penalty, row.sampling.presence_penalty) for row in rows]
    frequency, presence = array_to_device(np.array(penalties), logits.device)[at_row].unbind(1)
    logits[at_row, at_token] += (-frequency * times.double() - presence).float()


def _biases(rows: Sequence[SamplingRow]) -> _Entries:
    entries = _Entries()
    for index, row in enumerate(rows):
        if row.sampling.logit_bias:
            tokens, values = zip(*row.sampling.logit_bias, strict=True)
            entries.add(index, tokens, values)
    return entries


def _add(logits: torch.Tensor, entries: _Entries) -> None:
    if entries.rows:
        at_row, at_token, values = entries.place(logits.device)
        logits[at_row, at_token] += values


def _keep_open(
    logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Set[int], grammars: Mapping[int, TokenBits]
) -> torch.Tensor:
    """Forbids tokens that are banned or not allowed. Bans that would leave a row no token do not hold there."""
    allowed, banned = _Entries(), _Entries()
    vocab_size = logits.shape[-1]
    logits = _keep_bits(logits, grammars)
    for index, row in enumerate(rows):
        if index in grammars:
            continue
        open_ids = row.sampling.allowed_token_ids
        if open_ids:
            allowed.add(index, _array(_Identity(open_ids)), 0.0)
        bans = {token for token in _bans(row, eos_token_ids) if token < vocab_size}
        if bans and not (bans.issuperset(open_ids) if open_ids else len(bans) == vocab_size):
            banned.add(index, sorted(bans), 0.0)
    if allowed.rows:
        at_row, at_token, _ = allowed.place(logits.device)
        closed = logits.new_zeros(len(rows), dtype=torch.bool).index_fill_(0, at_row, True)
        left = logits.masked_fill(closed.unsqueeze(1), FORBIDDEN)
        left[at_row, at_token] = logits[at_row, at_token]
        logits = left
    if banned.rows:
        at_row, at_token, _ = banned.place(logits.device)
        logits.index_put_((at_row, at_token), logits.new_full((), FORBIDDEN))
    return logits


def _keep_bits(logits: torch.Tensor, grammars: Mapping[int, TokenBits]) -> torch.Tensor:
    """Forbids the tokens that these rows' bits do not name."""
    if not grammars:
        return logits
    places = list(grammars)
    bits = array_to_device(np.stack(list(grammars.values())), logits.device)
    ceilings = _ceilings(logits.device).index_select(0, bits.int().flatten())
    ceilings = ceilings.view(len(places), -1)[:, : logits.shape[-1]]
    # A minimum takes a tenth of the time of a masked_fill on a CPU.
    if len(places) == len(logits):
        return torch.minimum(logits, ceilings, out=logits)
    logits[places] = torch.minimum(logits[places], ceilings)
    return logits


@lru_cache(maxsize=8)
def _ceilings(device: torch.device) -> torch.Tensor:
    """Returns for each byte of ``TokenBits`` what the logits of its eight tokens may be at most."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits != 0, np.float32(np.inf), np.float32(FORBIDDEN))).to(device)


def _bans(row: SamplingRow, eos_token_ids: Set[int]) -> Iterable[int]:
    sampling = row.sampling
    early = row.position < sampling.min_tokens
    if early:
        yield from sampling.stop_token_ids
    # An answer that ignores these tokens may go on after them, but no grammar does.
    ends = sampling.grammar is not None if sampling.ignore_eos else early
    if ends:
        yield from eos_token_ids
    for *before, last in sampling.bad_words:
        if row.has_generated(before):
            yield last
