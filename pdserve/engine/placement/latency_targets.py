"""Says how soon this engine's tokens should come: the operator's targets, or what follows from measured steps.

A request may have targets of its own (``RequestTargets``), which hold in place of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.config import Batching, TargetsConfig
from pdserve.engine.placement.step_cost import StepCost
from pdserve.wire.discovery import Role
from pdserve.wire.terms import RequestTargets

ITL_FACTOR = 2.0
"""A decode node's step may take so many times what it takes without prompts, if the operator has set no target."""
MIXED_ITL_FACTOR = 7.0
"""The same for a mixed node. Its own prompts have no other place, and larger chunks of them cost less."""
TTFT_FACTOR = 2.0
"""A first token may take so many times what its prompt takes alone on this node, if the operator has set no target."""
TTFT_AIM = 0.5
"""A first token is planned for this share of its target, where chunks in this node's own steps keep the ITL target."""
TTFT_PATIENCE = 1.5
"""A first token may take so many times its target where ``LEAST_PROMPT_TOKENS`` in a step would break an ITL target
that is set, and that decoding alone keeps, or exceeds by no more than ``_LITTLE_OVER``."""
_LITTLE_OVER = 1.25
"""A stream can keep an ITL target on average although some decode steps take up to so many times the target."""

LEAST_PROMPT_TOKENS = 8
"""So many tokens of prompts are computed in a step however long it takes."""


@dataclass(frozen=True, slots=True)
class OwnItl:
    """The ITL targets that the requests of a step have of their own."""

    tightest_s: float | None = None
    """The tightest of them; None if no request has one."""
    all_have: bool = False
    """Whether every request has one, so that the node's own bounds nothing."""

    @classmethod
    def of(cls, requests: Iterable[RequestTargets]) -> OwnItl:
        """Returns those of the requests that have these targets."""
        own, noted = NONE_YET, None
        for targets in requests:
            # Those of requests without any are one object.
            if targets is not noted:
                own, noted = own.beside(targets), targets
        return own

    def beside(self, own: RequestTargets) -> OwnItl:
        """Returns those of the requests with one more."""
        if own.itl_ms is None:
            return OwnItl(self.tightest_s) if self.all_have else self
        itl_s = own.itl_ms / 1000
        return OwnItl(itl_s if self.tightest_s is None else min(self.tightest_s, itl_s), self.all_have)


NONE_YET = OwnItl(all_have=True)
"""What ``beside`` begins with."""
NONE_OWN = OwnItl()
"""Requests of which none has a target of its own."""


@dataclass(frozen=True, slots=True)
class TtftAim:
    """How soon a first token should come, in seconds from its request's arrival, by where its prompt is computed."""

    there_s: float
    """A prompt goes to a prefill node from which its first token comes within this time."""
    here_s: float = math.inf
    """If the first token would come later than this from this node, the prompt is left to the prefill node, so that its
    chunks do not slow this node's streams. Infinite: there is no such limit."""


class LatencyTargets:
    """The targets in force: TTFT for a prompt, ITL for a step of a decoding batch. The class has no clock.

    Without the operator's target, a decode node's steps are short: what it does not compute, a prefill node may. Those
    of a mixed node are longer, and those of a prefill node have no bound. A static batch computes its prompts before it
    decodes, so no stream waits for them.
    """

    def __init__(
        self, config: TargetsConfig, step_cost: StepCost, role: Role, batching: Batching = Batching.CONTINUOUS
    ) -> None:
        self.role = role
        """The node's present role."""
        self._ttft_s = config.target_ttft_ms / 1000
        self._itl_s = config.target_itl_ms / 1000
        self._step_cost = step_cost
        self._static = batching is Batching.STATIC

    def itl_s(self, rows: int, context_tokens: int, own: OwnItl = NONE_OWN) -> float | None:
        """Returns how long a step may take in which so many requests decode; None if there is no bound.

        There is none before a decode step was measured (``unmeasured``), unless the operator has set one. A request
        that wants its tokens sooner than in twice the time of such a step gets them in that time: other clients'
        prompts have to go on beside it.
        """
        if self._static:
            return None
        bounds = [] if own.all_have else [self._node_itl_s(rows, context_tokens)]
        if own.tightest_s is not None:
            least_s = self._times_decoding_s(ITL_FACTOR, rows, context_tokens) or 0.0
            bounds.append(max(own.tightest_s, least_s))
        return min((bound for bound in bounds if bound is not None), default=None)

    def unmeasured(self, own: OwnItl) -> bool:
        """Returns whether a step that decodes has to be computed without prompts now: its time says what the bound is.

        Where prompts never end, no step would be without them. Streams would wait for the longest chunks, or one
        request's own target would have no least value.
        """
        if self._static or self._step_cost.decoding_known:
            return False
        return own.tightest_s is not None or (self._factor is not None and not self._itl_s)

    @property
    def _factor(self) -> float | None:
        return {Role.DECODE: ITL_FACTOR, Role.MIXED: MIXED_ITL_FACTOR}.get(self.role)

    def _node_itl_s(self, rows: int, context_tokens: int) -> float | None:
        return self._itl_s or self._times_decoding_s(self._factor, rows, context_tokens)

    def _times_decoding_s(self, factor: float | None, rows: int, context_tokens: int) -> float | None:
        """Returns ``factor`` times what such a step takes without prompts; None if either is not known."""
        if factor is None or not self._step_cost.decoding_known:
            return None
        return factor * self._step_cost.estimate_s(rows, context_tokens, 0)

    def aim_s(self, rows: int, context_tokens: int, own: OwnItl = NONE_OWN) -> float | None:
        """Returns how long such a step is planned to take; None if there is no bound.

        As far as steps differ from their estimates, they aim below the target: it is a bound and no mean.
        """
        itl_s = self.itl_s(rows, context_tokens, own)
        return None if itl_s is None else itl_s / (1 + self._step_cost.spread)

    def ttft_s(self, alone_s: float) -> float:
        """Returns how long the first token of a prompt may take that takes ``alone_s`` on this node alone."""
        return self._ttft_s or TTFT_FACTOR * alone_s

    def ttft_aim(
        self, alone_s: float, own_ms: float | None, rows: int, context_tokens: int, own_itl: OwnItl = NONE_OWN
    ) -> TtftAim:
        """Returns how soon the first token of such a prompt should come.

        ``own_ms`` is the target of the request itself, if it has one. Queues grow while prompts are in them, so the aim
        is below a target that somebody has set: this node computes a prompt rather than let it come late. But it takes
        the whole time where its own steps are too long for more than ``LEAST_PROMPT_TOKENS`` as it is. It takes even
        more where these few would break an ITL target that is set, since streams would be late; if that is the target
        of all streams, there is a limit for first tokens from this node as well. A target that decoding alone breaks by
        far asks for no such patience: no stream would be saved.
        """
        ttft_s = self.ttft_s(alone_s) if own_ms is None else own_ms / 1000
        node_s, own_s = self._itl_s or math.inf, own_itl.tightest_s or math.inf
        for_all_s = own_s if own_itl.all_have else node_s
        itl_s = min(for_all_s, own_s)
        if rows and itl_s < math.inf and not self._static:
            cost = self._step_cost
            decoding_s = cost.estimate_s(rows, context_tokens, 0)
            least_s = cost.estimate_s(rows, context_tokens, LEAST_PROMPT_TOKENS) if cost.known else 0.0
            if decoding_s <= _LITTLE_OVER * itl_s and itl_s < least_s:
                return TtftAim(TTFT_PATIENCE * ttft_s, ttft_s if for_all_s < least_s else math.inf)
            if cost.decoding_known and itl_s < ITL_FACTOR * decoding_s:
                return TtftAim(ttft_s)
        return TtftAim(TTFT_AIM * ttft_s if own_ms is not None or self._ttft_s else ttft_s)
