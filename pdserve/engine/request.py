"""One request inside the engine, and the states that it goes through.

    WAITING ─▶ WAITING_FOR_REMOTE_KVS ─▶ RUNNING ─▶ FINISHED    prefilled by another node
    WAITING ◀─ WAITING_FOR_REMOTE_KVS                           the fetch failed, or there is no place for it yet
    WAITING ◀─ WAITING_FOR_REMOTE_KVS                           a holder gave what it has; the rest goes as above
    WAITING ─▶ RUNNING ─▶ FINISHED                              prefilled where it is decoded
    WAITING ◀─ RUNNING                                          preempted: its blocks were needed
    WAITING ─▶ RUNNING ─▶ PUSHING ─▶ FINISHED                   prefilled for another node
    WAITING_FOR_PROMPT ─▶ RUNNING ─▶ FINISHED                   a child: its parent's prompt is in the cache
    WAITING_FOR_PROMPT ─▶ WAITING                               the same, but no block is free for it
    WAITING ─▶ FINISHED                                         only fetched: the holders gave what they have
    (any)   ─▶ FINISHED                                         aborted, past its deadline, or failed

A prompt that is being prefilled and an answer that is being decoded are the same thing here: tokens whose keys and
values are not computed yet. ``num_computed_tokens`` says how far the cache is; a step advances it. Several tokens of an
answer that are not computed yet are *replayed* (``scheduling.batch_plan``): those of a preempted request, and *emitted*
ones, which another node has generated. *Holders* are engines that may have blocks of prompt and answer in their prefix
caches. They are asked first, and what they do not have is computed or replayed.

Several answers to one prompt (``n``) are several requests: one, the *parent*, computes or fetches the prompt, and its
*children* wait for that. A parent whose own answer ends before then goes on for its children.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.engine.kv_cache.prefix_cache import Match
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.engine.speculation.guesses import ModelDrafts, OwnText
from pdserve.errors import EngineError
from pdserve.tracing.timeline import TimelineNotes
from pdserve.wire.engine import PrefillReason, PrefillSource
from pdserve.wire.ids import RequestUuid, TransferId
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken, SamplingParams
from pdserve.wire.terms import PrefillTarget, Terms, turn_at


class TokenCounts:
    """Counts which tokens a request has, and how often, continued from step to step. Tokens are only ever appended.

    To count the tokens of a context anew for each token of each answer took a third of a second a step, with 64 answers
    of 32,768 tokens.
    """

    __slots__ = ("_all", "_generated")

    def __init__(self) -> None:
        self._all: _CountedTokens | None = None
        self._generated: _CountedTokens | None = None

    def present(self, token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Returns each token of prompt and answer once. The array is valid until the next call."""
        if self._all is None:
            # A long prompt is read at once, in C: no parameter needs to know how often its tokens occur.
            self._all = _CountedTokens(dict.fromkeys(token_ids), len(token_ids))
        self._all.read(token_ids)
        return self._all.tokens

    def generated(
        self, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns each token of the answer once, and how often it occurs. The arrays are valid until the next call."""
        if self._generated is None:
            self._generated = _CountedTokens((), num_prompt_tokens)
        self._generated.read(token_ids)
        return self._generated.tokens, self._generated.times


class _CountedTokens:
    def __init__(self, tokens: Iterable[int], num_read: int) -> None:
        """``tokens`` are all different, and come from the ``num_read`` tokens that were read already."""
        self._tokens = np.fromiter(tokens, np.int64)
        self._times = np.ones(len(self._tokens), np.int64)
        self._place = {token: place for place, token in enumerate(self._tokens.tolist())}
        self._num_read = num_read

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self._tokens[: len(self._place)]

    @property
    def times(self) -> npt.NDArray[np.int64]:
        return self._times[: len(self._place)]

    def read(self, token_ids: Sequence[int]) -> None:
        for token in token_ids[self._num_read :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._tokens):
                self._tokens, self._times = _doubled(self._tokens), _doubled(self._times)
            self._tokens[place] = token
            self._times[place] += 1
        self._num_read = len(token_ids)


def _doubled(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the array at twice the length or more, with zeros at its end."""
    return np.concatenate([array, np.zeros(max(16, len(array)), np.int64)])


class Status(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    WAITING_FOR_PROMPT = "waiting_for_prompt"
    """The request is a child whose parent computes or fetches the prompt."""
    RUNNING = "running"
    PUSHING = "pushing"
    """The prompt is computed; its blocks stay until the decode node has them."""
    FINISHED = "finished"


_NEXT: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.WAITING_FOR_REMOTE_KVS, Status.RUNNING, Status.FINISHED}),
    Status.WAITING_FOR_REMOTE_KVS: frozenset({Status.WAITING, Status.RUNNING, Status.FINISHED}),
    Status.WAITING_FOR_PROMPT: frozenset({Status.WAITING, Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.PUSHING, Status.FINISHED}),
    Status.PUSHING: frozenset({Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


@dataclass(slots=True)
class RequestFacts:
    """What has become of a request so far, for its report. Times are in monotonic seconds."""

    prefill_source: PrefillSource = PrefillSource.LOCAL
    prefill_node: str = ""
    placed: PrefillReason | None = None
    """Why the prompt was placed where it went last; None if there was nothing to choose."""
    cached_tokens: int = 0
    """The tokens of the prompt that no node had to compute for this request."""
    reused_tokens: int = 0
    """The emitted tokens, and those of their prompt, whose blocks were here or came from a holder."""
    admitted: float | None = None
    first_token_at: float | None = None
    transfer_seconds: float = 0.0
    drafts: int = 0
    """The guesses of its tokens that steps have checked."""
    accepted_drafts: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """The mutable state of one request. The scheduler owns it."""

    uuid: RequestUuid
    token_ids: list[int]
    """The prompt, followed by the tokens that were generated."""
    num_prompt_tokens: int
    sampling: SamplingParams
    arrived: float
    """The arrival in monotonic seconds."""
    terms: Terms
    """What came with the tokens. They name no client where another node ordered the prompt."""
    deadline: float = field(init=False)
    """The request is given up at this time, in monotonic seconds."""
    local_id: int | None = None
    """The API process's number for the request (``pdserve.wire.ids``); None if another node ordered the prompt."""
    group_id: int | bytes = b""
    """The id that all prompts and answers of one client request share. They take turns with others as one."""
    transfer: TransferId | None = None
    """The push that the request serves, if another node ordered it, and otherwise the fetch under way."""
    first_block: int = 0
    """The first block that the transfer moves; the decode node has the blocks before it."""
    attempts: int = 0
    """The number of prefill nodes that were tried."""
    num_emitted_tokens: int = 0
    """The number of the answer's first tokens that came with the request: its client has them from another node."""
    asked_holders: int = 0
    """The number of engines that were asked for blocks which they may hold."""
    offered_blocks: int = 0
    """The number of blocks that this node has, as far as it was told."""
    children: list[Request] = field(default_factory=list)
    """The requests that wait for this one's prompt."""
    parent: Request | None = None
    """The request whose prompt this one waits for or waited for."""

    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    block_table: BlockTable = field(default_factory=BlockTable)
    block_hashes: list[bytes] = field(default_factory=list)
    """The hashes of the first full blocks, as many as were needed so far."""
    num_scored_tokens: int = 0
    """The number of the prompt's tokens after the first whose log probabilities are known, or were."""
    scores: list[PromptLogprobs] = field(default_factory=list)
    """Those log probabilities, until they are passed on."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """The number of times that each token occurs, for penalties."""
    matcher: GrammarMatcher | None = None
    """The state of the request's grammar; None if it has no grammar, or that is being compiled."""
    may_draft: bool = True
    """Whether steps may check drafts of the request. None are checked after one whose values were not finite."""
    own_text: OwnText | None = None
    """What guesses the next tokens from those so far; None until the request decodes and may have drafts."""
    model_drafts: ModelDrafts | None = None
    """What the model has drafted; None before it has."""
    match: Match = field(default_factory=Match)
    """The blocks that the prefix cache has for ``block_hashes``, while the request waits."""
    ended: bool = False
    """Whether the client has been told the end, or is gone."""
    pushed_blocks: int = 0

    facts: RequestFacts = field(default_factory=RequestFacts)
    first_token: SampledToken | None = None
    """The token that the push reports of this request, if it serves one."""
    notes: TimelineNotes | None = None
    """What is noted of the request for its timeline; None if nothing is."""

    def __post_init__(self) -> None:
        self.group_id = self.group_id or self.uuid
        self.deadline = self.arrived + self.terms.deadline_s

    def add_child(self, seed: int, local_id: int | None = None, emitted: Sequence[int] = ()) -> Request:
        """Adds and returns a request for one more answer to this prompt, with a seed and emitted tokens of its own."""
        child = Request(
            uuid=self.uuid,
            token_ids=[*self.token_ids[: self.num_prompt_tokens], *emitted],
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=msgspec.structs.replace(self.sampling, seed=seed, prompt_logprobs=None),
            arrived=self.arrived,
            terms=self.terms,
            local_id=local_id,
            group_id=self.group_id,
            num_emitted_tokens=len(emitted),
            parent=self,
            status=Status.WAITING_FOR_PROMPT,
        )
        self.children.append(child)
        return child

    def move(self, status: Status) -> None:
        """Changes ``status``; nothing else does. Raises EngineError on a transition that is not drawn above."""
        if status not in _NEXT[self.status]:
            raise EngineError(f"{self}: a request cannot go from {self.status.name} to {status.name}")
        self.status = status

    @property
    def serves_push(self) -> bool:
        """Whether another node ordered this prompt. Its blocks go there, so it cannot be preempted."""
        return self.local_id is None

    @property
    def awaits_grammar(self) -> bool:
        """Whether the request can be in no step yet: its grammar, or what that says of the next token, is worked out.

        A parent waits for the children to whom its prompt's last step gives a token as well.
        """
        if self.sampling.grammar is None or self.terms.fetch_only:
            return False
        if self.matcher is None or self.awaits_mask:
            return True
        return not self.prompt_is_computed and any(child.awaits_grammar for child in self.children)

    @property
    def awaits_mask(self) -> bool:
        """Whether it is being worked out what the grammar says of the next token."""
        return self.matcher is not None and self.matcher.awaited

    @property
    def grammar_failure(self) -> str | None:
        """Why the grammar leaves the answer no token; None while it leaves some."""
        return None if self.matcher is None else self.matcher.failure

    @property
    def answer(self) -> list[int]:
        """A copy of the tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def turn_at(self) -> float:
        """The time by which waiting requests take turns: that of its arrival, moved by its priority."""
        return turn_at(self.arrived, self.terms.prompt.priority)

    @property
    def targets(self) -> tuple[PrefillTarget, ...]:
        """The prefill nodes that were not tried yet. Children have none: their parent's prompt is theirs."""
        return () if self.parent is not None else self.terms.prefill[self.attempts :]

    @property
    def return_to(self) -> PrefillTarget | None:
        """The prefill node that is offered the blocks of the answer and of its children's; None if there is none."""
        return self.terms.prefill[max(0, self.attempts - 1)] if self.terms.prefill else None

    @property
    def holders(self) -> tuple[PrefillTarget, ...]:
        """The engines that may hold blocks of this request, and were not asked yet."""
        asks = self.parent is None or self.num_emitted_tokens
        return self.terms.holders[self.asked_holders :] if asks else ()

    @property
    def may_ask_holders(self) -> bool:
        """Whether an engine is left to be asked for blocks. None has those of tokens that were generated here."""
        return bool(self.holders) and not self.needs_scores and self.num_generated_tokens == self.num_emitted_tokens

    @property
    def needs_scores(self) -> bool:
        """Whether log probabilities of the prompt are missing: its tokens have to be computed, in whatever cache they
        are.
        """
        if self.sampling.prompt_logprobs is None or self.terms.fetch_only:
            return False
        return self.num_scored_tokens < self.num_prompt_tokens - 1

    def __str__(self) -> str:
        """Returns the request's name in log lines. ``TransferId`` begins with the same digits of the uuid."""
        return f"request_id={self.terms.prompt.request_id or '-'} uuid={self.uuid.hex()[:12]}"

    @property
    def most_tokens(self) -> int:
        """The tokens of its prompt, and of its answer if that is as long as it may be."""
        return max(len(self.token_ids), self.num_prompt_tokens + self.sampling.max_tokens)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a step has given the request here, with the drafts that were accepted."""
        tokens = self.num_generated_tokens - self.num_emitted_tokens
        return tokens / (tokens - self.facts.accepted_drafts) if tokens else 1.0

    @property
    def prompt_is_computed(self) -> bool:
        """Whether the whole prompt is in the KV cache, so that only tokens of the answer are left to compute."""
        return self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens that are known but not in the KV cache. A decoding request has 1."""
        return len(self.token_ids) - self.num_computed_tokens
