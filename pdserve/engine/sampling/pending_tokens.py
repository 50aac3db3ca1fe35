"""Holds the tokens that a step samples until they are read, which is later than the step is launched.

On a GPU the host is free until it reads them: the tokens cross into page-locked memory behind the step's kernels, and
the next step can take them on the device. So do penalties, biases and reports of log probabilities.

The grammar of a row is asked when its token is read. A token that is chosen as if there were none (``proposes``) is
sampled on the device all the same. Where the grammar then refuses it, another one is chosen from the row's logits, and
what was launched with the refused one is in vain. Any other row with a grammar, and one with bad words of several
tokens, needs its request's last token on the host: it is sampled when it is read. Such rows keep no others waiting.

Of the tokens after a step's drafts, those of rows without rules and grammar need none of the tokens before them, and
are sampled with the step's other ones. A row that looks back is sampled when the drafts before it were accepted, so
that it sees them as it would have in a step of its own. So is, on the host, a row whose token is drawn: that takes a
fiftieth of a small model's step, and those after a wrong draft are not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Protocol

import msgspec
import torch

from pdserve.engine.request import Request
from pdserve.engine.sampling.logit_rules import has_own_rules, needs_last_token
from pdserve.engine.sampling.logprobs import PendingReports
from pdserve.engine.sampling.sampler import GrammarStep, GrammarTime, choose_instead, proposes, reports_of, sample
from pdserve.engine.sampling.sampling_row import SamplingRow, row_groups
from pdserve.engine.sampling.token_choice import TokenChoice, after_rules, draw, group_logits, is_drawn, uniform
from pdserve.wire.sampling_params import SampledToken, TokenLogprobs
from pdserve_kernels.host_copies import HostCopy, to_device

_NOT_FINITE = -1
KNOWN = -2
"""Stands for the last token of a row whose tokens are all on the host. It is not the mark of ``logit_rules``."""


class PendingTokens(Protocol):
    """The sampled tokens of a step, to be read once."""

    @property
    def tokens(self) -> torch.Tensor | None:
        """Token ids, int64, of the rows that are sampled on the device; None without any."""

    @property
    def refused(self) -> Set[int]:
        """The rows that were read with another token than the one in ``tokens``, or with none."""

    @property
    def late(self) -> Collection[int]:
        """The rows that are sampled when they are read."""

    def places(self, rows: Sequence[int]) -> Sequence[int]:
        """Returns the places of these rows' tokens in ``tokens``. None of the rows may be ``late``."""

    def keep(self) -> None:
        """Copies the logits that may be looked at once more: a step that is launched next may write over them."""

    def read(self, rows: Sequence[int] | None = None) -> list[SampledToken | None]:
        """Returns what ``sampler.sample`` returns for these rows, by default for all. Waits for a GPU.

        The grammars of other rows, whose requests have ended, are not asked.
        """


def can_sample_on_device(row: SamplingRow) -> bool:
    """Returns whether a row's token can be sampled without the tokens that are not on the host yet."""
    if row.sampling.grammar is not None:
        # After a refusal, the next token is likely to be refused, too, and the step ahead would be in vain.
        return row.matcher is not None and row.matcher.agrees and proposes(row)
    return not (row.num_unknown_tokens and needs_last_token(row))


class HostTokens:
    """Tokens that are sampled when they are read; ``logits`` have to be valid until then, or until ``keep``.

    Row ``i`` is sampled from ``logits[sources[i]]``.
    """

    tokens = None
    refused: Set[int] = frozenset()

    def __init__(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], sources: Sequence[int], eos_token_ids: Set[int]
    ) -> None:
        self._logits, self._rows, self._sources, self._eos_token_ids = logits, rows, sources, eos_token_ids

    @property
    def late(self) -> Collection[int]:
        return range(len(self._rows))

    def places(self, rows: Sequence[int]) -> Sequence[int]:
        return ()

    def keep(self) -> None:
        self._logits = group_logits(self._logits, self._sources)
        self._sources = range(len(self._rows))

    def read(self, rows: Sequence[int] | None = None) -> list[SampledToken | None]:
        asked = range(len(self._rows)) if rows is None else rows
        own_rows, sources = [self._rows[index] for index in asked], [self._sources[index] for index in asked]
        return sample(self._logits, own_rows, self._eos_token_ids, sources)


class DeviceTokens:
    """Tokens that are sampled behind the kernels that compute ``logits``. All rows are ``can_sample_on_device``."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        sources: Sequence[int],
        eos_token_ids: Set[int],
        last: torch.Tensor | None = None,
    ) -> None:
        """Row ``i`` is sampled from ``logits[sources[i]]``.

        ``last``, int64 ``[rows]``, has the last tokens of rows that have an unknown one, and ``KNOWN`` for the others.
        """
        self._rows, self._eos_token_ids = rows, eos_token_ids
        self._proposed = [index for index, row in enumerate(rows) if row.sampling.grammar is not None]
        self._logits: torch.Tensor | None = logits if self._proposed else None
        self._sources = sources
        self.refused: Set[int] = frozenset()
        self.late: Collection[int] = ()
        best = logits.max(-1)
        (from_row,) = to_device([sources], logits.device)
        self.tokens: torch.Tensor = best.indices.index_select(0, from_row)
        finite = best.values.isfinite().index_select(0, from_row)
        drawn = [index for index, row in enumerate(rows) if is_drawn(row.sampling)]
        ruled = [index for index, row in enumerate(rows) if has_own_rules(row)]
        for group in (*row_groups(sorted(set(ruled).difference(drawn)), logits), *row_groups(drawn, logits)):
            own_rows, (places,) = [rows[index] for index in group], to_device([group], logits.device)
            own = group_logits(logits, [sources[index] for index in group])
            # A row that is not finite gets some token all the same, which is not looked at.
            own.masked_fill_(~finite.index_select(0, places).unsqueeze(1), 0.0)
            own_last = None if last is None else last.index_select(0, places)
            own, sane = after_rules(own, own_rows, eos_token_ids, {}, own_last)
            if sane is not None:
                own.masked_fill_(~sane.unsqueeze(1), 0.0)
                finite.index_copy_(0, places.long(), finite.index_select(0, places) & sane)
            if is_drawn(own_rows[0].sampling):
                uniforms = [uniform(row.sampling.seed, row.position) for row in own_rows]
                chosen = draw(own, [row.sampling for row in own_rows], uniforms)
            else:
                chosen = own.argmax(-1)
            self.tokens.index_copy_(0, places.long(), chosen)
        self._arrival = HostCopy(self.tokens.where(finite, _NOT_FINITE))
        self._asking = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        self._reports: PendingReports | None = None
        if self._asking:
            (places,) = to_device([self._asking], logits.device)
            asking = [rows[index] for index in self._asking]
            tokens = self.tokens.index_select(0, places)
            self._reports = PendingReports(logits, asking, [sources[index] for index in self._asking], tokens)

    def places(self, rows: Sequence[int]) -> Sequence[int]:
        return rows

    def keep(self) -> None:
        if self._logits is not None:
            self._logits = group_logits(self._logits, [self._sources[index] for index in self._proposed])
            places = {index: place for place, index in enumerate(self._proposed)}
            self._sources = [places.get(index, 0) for index in range(len(self._rows))]

    def read(self, rows: Sequence[int] | None = None) -> list[SampledToken | None]:
        asked = range(len(self._rows)) if rows is None else rows
        if self._logits is not None:
            logits, self._logits = self._logits, None
            return self._read_by_grammars(logits, asked)
        tokens, reports = self._arrival.read().tolist(), self._read_reports()
        return [
            None if tokens[index] == _NOT_FINITE else SampledToken(tokens[index], reports.get(index)) for index in asked
        ]

    def _read_by_grammars(self, logits: torch.Tensor, asked: Sequence[int]) -> list[SampledToken | None]:
        # The host has the tokens by now that it did not have when the step was launched.
        rows = [msgspec.structs.replace(row, num_unknown_tokens=0) for row in self._rows]
        proposed = set(self._proposed).intersection(asked)
        grammars = GrammarStep(rows, logits.shape[-1], self._eos_token_ids)
        if logits.device.type != "cpu":
            # The GPU may still compute the tokens meanwhile.
            grammars.make_masks({index for index in proposed if grammars.has_time(index)})
        tokens: list[int] = self._arrival.read().tolist()
        finite = [token != _NOT_FINITE for token in tokens]
        choice = TokenChoice(logits, rows, self._sources, self._eos_token_ids, list(tokens), finite)
        choice.drop(grammars.without_token)
        choose_instead(choice, grammars, proposed)
        self.refused = {index for index in proposed if not finite[index] or choice.tokens[index] != tokens[index]}
        reports = self._read_reports() | reports_of(self.refused, logits, rows, self._sources, choice)
        return [SampledToken(choice.tokens[index], reports.get(index)) if finite[index] else None for index in asked]

    def _read_reports(self) -> dict[int, TokenLogprobs]:
        return {} if self._reports is None else dict(zip(self._asking, self._reports.read(), strict=True))


class MixedTokens:
    """Tokens of which some are sampled on the device, and the others when they are read."""

    def __init__(
        self, on_device: DeviceTokens, device_rows: Sequence[int], on_host: HostTokens, host_rows: Sequence[int]
    ) -> None:
        """``on_device`` has the rows with the numbers ``device_rows``, ``on_host`` those with ``host_rows``."""
        self._on_device, self._device_rows = on_device, device_rows
        self._on_host, self._host_rows = on_host, host_rows
        self._places = {row: place for place, row in enumerate(device_rows)}
        self.tokens = on_device.tokens
        self.late: Collection[int] = frozenset(host_rows)

    @property
    def refused(self) -> Set[int]:
        return {self._device_rows[place] for place in self._on_device.refused}

    def places(self, rows: Sequence[int]) -> Sequence[int]:
        return [self._places[row] for row in rows]

    def keep(self) -> None:
        self._on_device.keep()
        self._on_host.keep()

    def read(self, rows: Sequence[int] | None = None) -> list[SampledToken | None]:
        asked = range(len(self._device_rows) + len(self._host_rows)) if rows is None else rows
        wanted, found = set(asked), dict[int, SampledToken | None]()
        for pending, numbers in ((self._on_device, self._device_rows), (self._on_host, self._host_rows)):
            own = [place for place, number in enumerate(numbers) if number in wanted]
            found |= zip([numbers[place] for place in own], pending.read(own), strict=True)
        return [found[number] for number in asked]


def sample_later(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    sources: Sequence[int],
    eos_token_ids: Set[int],
    last: torch.Tensor | None = None,
    *,
    certain: int = 0,
) -> PendingTokens:
    """Samples on the device what can be sampled there, the first ``certain`` rows anyway.

    The other arguments are those of ``DeviceTokens``.
    """
    host_rows = [number for number, row in enumerate(rows[certain:], certain) if not can_sample_on_device(row)]
    if not host_rows:
        return DeviceTokens(logits, rows, sources, eos_token_ids, last)
    on_host = HostTokens(logits, [rows[i] for i in host_rows], [sources[i] for i in host_rows], eos_token_ids)
    if len(host_rows) == len(rows):
        return on_host
    later = set(host_rows)
    device_rows = [number for number in range(len(rows)) if number not in later]
    if last is not None:
        (places,) = to_device([device_rows], last.device)
        last = last.index_select(0, places)
    on_device = DeviceTokens(
        logits, [rows[i] for i in device_rows], [sources[i] for i in device_rows], eos_token_ids, last
    )
    return MixedTokens(on_device, device_rows, on_host, host_rows)


def looks_back(request: Request) -> bool:
    """Returns whether a token of the request depends on the tokens before it, besides the logits."""
    return request.sampling.grammar is not None or has_own_rules(SamplingRow.of(request))


class DraftTokens:
    """The tokens after drafts. The logits have to be valid until they are read."""

    def __init__(
        self, logits: torch.Tensor, places: Mapping[Request, range], eos_token_ids: Set[int], *, on_device: bool
    ) -> None:
        """``places`` says in which rows the logits after each request's drafts are."""
        self._logits, self._places, self._eos_token_ids = logits, places, eos_token_ids
        self.at_once = [
            (request, rows)
            for request, rows in places.items()
            if not looks_back(request) and (on_device or not is_drawn(request.sampling))
        ]
        """The requests whose tokens are sampled with the step's other ones, and the rows of their logits."""
        self._sampled: dict[Request, Sequence[SampledToken | None]] = {}
        self._grammar_time = GrammarTime()

    def take(self, tokens: Iterable[SampledToken | None]) -> None:
        """Takes the tokens of the requests that are sampled ``at_once``, in their order."""
        left = iter(tokens)
        self._sampled = {request: list(islice(left, len(places))) for request, places in self.at_once}

    def are_finite(self, request: Request) -> bool:
        """Returns whether the logits after all of the request's drafts are finite. Waits for a GPU.

        Those after a wrong draft count as well: what led to them is in the KV cache.
        """
        if request in self._sampled:
            return None not in self._sampled[request]
        places = self._places[request]
        return bool(self._logits[places.start : places.stop].amax(-1).isfinite().all())

    def after(self, request: Request, number: int) -> SampledToken | None:
        """Returns the token after the request's first ``number`` drafts, which are its last tokens.

        Returns None where ``sampler.sample`` does. Waits for a GPU.
        """
        if request in self._sampled:
            return self._sampled[request][number - 1]
        source = self._places[request][number - 1]
        # Of the step's logits, no others are looked at.
        logits, row = self._logits[source : source + 1], SamplingRow.of(request)
        return sample(logits, [row], self._eos_token_ids, time=self._grammar_time)[0]
