"""The requests of a node that decode, in numbers only: a thousand steps without a change are one calculation."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from pdserve.plan.answer import Answer


@dataclass(slots=True, eq=False)
class DecodingAnswer:
    """A request that decodes."""

    answer: Answer
    context: int
    """The tokens that its first step reads."""
    first_tick: int
    """The number of steps that were over when it came."""
    last_tick: int
    since: float | None
    """When its last token came; None if that was at the end of the last step."""
    gone: bool = False


@dataclass(slots=True)
class Decoding:
    """All members. Each step gives each of them a token, so a clock of steps, the *tick*, stands for all of them."""

    block_size: int
    rows: int = 0
    context_tokens: int = 0
    """The tokens that the next step reads."""
    tick: int = 0
    _ends: list[tuple[int, int, DecodingAnswer]] = field(default_factory=list)
    _joined: int = 0
    _new: list[DecodingAnswer] = field(default_factory=list)
    _growing: list[int] = field(default_factory=list)
    """How many members need a block at each tick, by the tick's remainder."""

    def __post_init__(self) -> None:
        self._growing = [0] * self.block_size

    def join(self, answer: Answer, tokens: int, since: float | None) -> None:
        """Adds an answer whose ``tokens`` are in the cache, without the last one of those that its client has."""
        member = DecodingAnswer(answer, tokens + 1, self.tick, self.tick + answer.tokens_left, since)
        self._joined += 1
        heapq.heappush(self._ends, (member.last_tick, self._joined, member))
        self.rows += 1
        self.context_tokens += member.context
        self._growing[self._remainder(member)] += 1
        if since is not None:
            self._new.append(member)

    @property
    def steps_to_end(self) -> int:
        """The number of steps until the first member ends. There has to be one."""
        while self._ends[0][2].gone:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.tick

    def blocks_for(self, steps: int) -> int:
        """Returns how many blocks all members together need for so many more steps."""
        cycles, rest = divmod(steps, self.block_size)
        return cycles * self.rows + sum(self._growing[-(self.tick + step) % self.block_size] for step in range(rest))

    def take_new(self) -> list[DecodingAnswer]:
        """Returns the members whose next gap began before the last step ended, once."""
        new, self._new = [member for member in self._new if not member.gone], []
        return new

    def advance(self, steps: int) -> list[DecodingAnswer]:
        """Gives each member so many tokens, at most ``steps_to_end``. Returns those that have ended."""
        self.tick += steps
        self.context_tokens += steps * self.rows
        ended = []
        while self._ends and (self._ends[0][2].gone or self._ends[0][0] <= self.tick):
            member = heapq.heappop(self._ends)[2]
            if not member.gone:
                self._leave(member)
                ended.append(member)
        return ended

    def evict(self) -> DecodingAnswer:
        """Takes the youngest member out. There has to be one."""
        _, _, member = max((entry for entry in self._ends if not entry[2].gone), key=lambda entry: entry[1])
        member.gone = True
        member.answer.tokens_left = member.last_tick - self.tick
        self._leave(member)
        return member

    def context_of(self, member: DecodingAnswer) -> int:
        """Returns the tokens that the member's next step reads."""
        return member.context + self.tick - member.first_tick

    def _leave(self, member: DecodingAnswer) -> None:
        self.rows -= 1
        self.context_tokens -= self.context_of(member)
        self._growing[self._remainder(member)] -= 1

    def _remainder(self, member: DecodingAnswer) -> int:
        return (member.context - 1 - member.first_tick) % self.block_size
