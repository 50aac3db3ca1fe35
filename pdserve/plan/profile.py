"""The profile of a machine: what a node of one model takes for its steps, transfers and answers there.

``pdserve plan profile`` measures it and writes it as JSON. Predictions and simulations read it. It holds for that
machine, model and settings only. The parts of a step's time are those that explain the measured times best, by least
squares of relative errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from pdserve.engine.placement.step_cost import StepParts, Times
from pdserve.engine.scheduling.batch_plan import chunk_tokens
from pdserve.errors import PlanError

VERSION = 2
"""Since version 2, each speed has a probe, and not the whole profile."""
MOST_NODES = 2
"""A profile knows machines with so many nodes at most."""


class PaceProbe(Times, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What some prompts and streams took where nothing else was computed. Measured again, it tells the pace."""

    prompt_s: float
    """The time to the first token of a prompt that was alone."""
    step_s: float
    """A step of several streams."""


class NodeSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the steps of one node take, where ``nodes`` nodes divide the cores of the machine evenly."""

    nodes: int
    steps: StepParts
    """While the others have nothing to compute, and lend their cores if they may."""
    beside: StepParts
    """While the others compute. The same as ``steps`` for a node that has the machine for itself."""
    spread: tuple[float, ...] = (1.0,)
    """Evenly spaced quantiles of how steps differ from their estimates, as multiples of these."""
    spread_beside: tuple[float, ...] = ()
    """The same while the others compute; empty if that makes no difference."""
    probe: PaceProbe | None = None
    """What a later probe is compared with, where somebody does that."""

    def spread_of(self, beside: bool) -> tuple[float, ...]:
        """Returns how steps differ from their estimates while the others compute, or sleep."""
        return self.spread_beside if beside and self.spread_beside else self.spread

    @property
    def mean_spread(self) -> float:
        """By how much of its estimate a step differs from it, on average over both."""
        both = (self.spread, self.spread_of(True))
        return sum(sum(abs(times - 1) for times in spread) / len(spread) for spread in both) / len(both)

    @property
    def least_spread(self) -> float:
        """The least multiple of its estimate that a step takes."""
        return min(self.spread + self.spread_beside)


class TransferCost(Times, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a prompt's KV cache takes from one node to another."""

    fixed_s: float
    """The time from the order to the prefill node's first step, and from its last one to the first token, together."""
    byte_s: float
    """What each byte takes that moves after the last step."""

    def seconds(self, size: int) -> float:
        """Returns what ``size`` bytes take that move while nothing computes."""
        return self.fixed_s + size * self.byte_s


class FrontCost(Times, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What proxy, HTTP server and tokeniser add to the time to the first token."""

    request_s: float
    token_s: float
    """What each token of the prompt adds."""

    def seconds(self, prompt_tokens: int) -> float:
        return self.request_s + prompt_tokens * self.token_s


class CacheGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The KV cache of a node, and what its scheduler allows."""

    block_size: int
    """The tokens that a block holds."""
    num_blocks: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prompt_bytes: int = 0
    """What moves with a prompt beside its blocks: the end of its windows, and its state."""

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.block_size

    @property
    def room(self) -> int:
        """The tokens that it holds."""
        return self.num_blocks * self.block_size

    def blocks(self, tokens: int) -> int:
        """Returns the number of blocks that so many tokens need."""
        return -(-tokens // self.block_size)

    def moved_bytes(self, tokens: int) -> int:
        """Returns the bytes that move with a prompt of so many tokens."""
        return self.blocks(tokens) * self.block_bytes + self.prompt_bytes

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether so many requests of so many tokens fit, each of which may grow by a block."""
        return requests * (self.blocks(tokens) + 1) <= self.num_blocks


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured of one model on one machine."""

    version: int
    model: str
    machine: str
    """The processor's name."""
    cores: int
    measured: str
    """The date and time of the measurement, in UTC."""
    speeds: tuple[NodeSpeed, ...]
    """One for each number of nodes on the machine that was measured."""
    transfer: TransferCost | None
    """None if no transfer was measured."""
    front: FrontCost
    cache: CacheGeometry

    def telling_s(self, output_tokens: float) -> float:
        """Returns how long requests have to come before it shows whether a node keeps up with them.

        It is several times as long as answers of ``output_tokens`` take on a node that is full.
        """
        parts, rows = self.speeds[0].steps, self.cache.max_num_seqs
        return max(60.0, 4 * output_tokens * parts.step_s(rows, rows * output_tokens, 0))

    def speed(self, nodes: int) -> NodeSpeed:
        """Returns the speed of each of ``nodes`` nodes that share a machine like this one. Raises PlanError."""
        for speed in self.speeds:
            if speed.nodes == nodes:
                return speed
        known = ", ".join(str(speed.nodes) for speed in self.speeds)
        advice = f"`pdserve plan profile --nodes {nodes}` measures it" if nodes <= MOST_NODES else "two are the most"
        raise PlanError(f"the profile says nothing of {nodes} nodes on one machine, only of {known}; {advice}")


_MAY_BE_0 = frozenset({"block_bytes", "prompt_bytes"})
"""A model of states only has blocks without bytes, and one without windows moves no more than its blocks."""


class _Versioned(msgspec.Struct):
    """The part of a profile that is alike in all versions."""

    version: int


def read_profile(path: Path) -> Profile:
    """Returns the profile in a file. Raises PlanError if there is none that this version can use."""
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            raise PlanError(
                f"{path} is a profile of version {version}, and this pdserve reads version {VERSION}; "
                f"`pdserve plan profile --out {path}` makes one"
            )
        profile = msgspec.json.decode(content, type=Profile)
    except OSError as exc:
        raise PlanError(
            f"cannot read the profile {path}: {exc.strerror}; `pdserve plan profile --out {path}` measures one"
        ) from exc
    except msgspec.MsgspecError as exc:
        raise PlanError(f"{path} is not a profile: {exc}; `pdserve plan profile --out {path}` makes one") from exc
    if wrong := _wrong(profile):
        raise PlanError(f"{path}: {wrong}")
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Raises PlanError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as exc:
        raise PlanError(f"cannot write the profile {path}: {exc.strerror}") from exc


def _wrong(profile: Profile) -> str:
    """Returns what no node can have; empty if there is nothing."""
    for speed in profile.speeds:
        if speed.nodes < 1:
            return f"speeds of {speed.nodes} nodes, where at least 1 is right"
        for parts in (speed.steps, speed.beside):
            times = msgspec.structs.asdict(parts)
            for name, seconds in times.items():
                if not 0 <= seconds < math.inf:
                    return f"a step's part {name} of {seconds} s, where a time of 0 or more is right"
            if not parts.prompt_token or not parts.step_s(1, 1, 0):
                return "steps that take no time"
        if not speed.spread or not all(0 < times < math.inf for times in speed.spread + speed.spread_beside):
            return "a spread that is not a list of positive numbers"
        if speed.probe is not None and not (0 < speed.probe.prompt_s < math.inf > speed.probe.step_s > 0):
            return "a probe that takes no time"
    costs = [profile.front.request_s, profile.front.token_s]
    if profile.transfer is not None:
        costs += [profile.transfer.fixed_s, profile.transfer.byte_s]
    if not all(0 <= cost < math.inf for cost in costs):
        return "negative times of transfers or requests"
    for name, number in msgspec.structs.asdict(profile.cache).items():
        least = 0 if name in _MAY_BE_0 else 1
        if number < least:
            return f"{name} of {number}, where at least {least} is right"
    return "" if profile.speeds else "no speeds"


_PARTS = StepParts.__struct_fields__
_LEAST_S = 1e-7
"""No step and no token of a prompt takes less, however noisy the machine was."""
_PLACES, _OF_EACH = 20, 100
"""The quantiles of a spread, and those of each batch that it is made of."""
_LEAST_TIMES = 0.05
"""No step takes less of its mean. A client that reads late sees shorter gaps, which are none."""


@dataclass(frozen=True, slots=True)
class Observed:
    """How often a measured time has each part, and how long it was."""

    parts: tuple[float, ...]
    """In the order of the fields of ``StepParts``."""
    fronts: float
    """How often it has the cost of a request before and after the engine."""
    seconds: float


def decode_step(rows: int, context_tokens: float, seconds: float) -> Observed:
    """A step in which so many requests decode."""
    return _observed(seconds, batch=1, request=rows, context_token=context_tokens)


def mixed_step(rows: int, context_tokens: float, prompt_tokens: int, seconds: float) -> Observed:
    """Such a step with a whole prompt beside them."""
    return _observed(
        seconds, batch=1, request=rows, context_token=context_tokens, chunk_beside=1, prompt_token=prompt_tokens
    )


def lone_prompt(prompt_tokens: int, chunk: int, seconds: float) -> Observed:
    """The time to the first token of a request that finds nothing else, computed in chunks of ``chunk`` tokens."""
    chunks = chunks_of(prompt_tokens, chunk)
    read = sum(tokens * done for done, tokens in chunks)
    return _observed(seconds, 1.0, chunk_alone=len(chunks), prompt_token=prompt_tokens, prompt_token_read=read)


def lone_prompt_s(parts: StepParts, prompt_tokens: int, chunk: int) -> float:
    """Returns what the steps of such a request take."""
    return sum(parts.step_s(0, 0, tokens, done) for done, tokens in chunks_of(prompt_tokens, chunk))


def fixed_part(explained: Sequence[float], took: Sequence[float]) -> float:
    """Returns by how much all of some times are longer than what explains them, which grows.

    A machine that others use may have become slower by a factor since that was measured, so the factor is found as
    well, and the result is at the former pace. It is not negative. Where nothing shows a factor, all is fixed.
    """
    counts = np.column_stack([explained, np.ones(len(explained))]) / np.array(took)[:, None]
    factor, fixed_s = _least_squares(counts)
    return float(fixed_s / factor if factor else fixed_s)


def chunks_of(prompt_tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Returns the chunks of a prompt that is computed alone: the tokens before each, and its own."""
    done, found = 0, []
    while done < prompt_tokens:
        tokens = chunk_tokens(prompt_tokens - done, chunk)
        found.append((done, tokens))
        done += tokens
    return found


def _observed(seconds: float, fronts: float = 0.0, **counts: float) -> Observed:
    return Observed(tuple(float(counts.get(name, 0.0)) for name in _PARTS), fronts, seconds)


def fit(observed: Sequence[Observed], front_s: float | None = None) -> tuple[StepParts, float]:
    """Returns the parts, and the cost of a request besides its steps, which is given or found as well.

    None of them is negative. Raises PlanError if what was observed does not tell a part.
    """
    rows = [(*row.parts, row.fronts if front_s is None else 0.0) for row in observed]
    times = [row.seconds - (0.0 if front_s is None else row.fronts * front_s) for row in observed]
    if not all(seconds > 0 for seconds in times):
        raise PlanError("a request took no longer than its way to the engine and back; the machine is too noisy")
    counts = np.array(rows) / np.array(times)[:, None]
    told = (counts > 0).any(axis=0)
    if not told[:-1].all():
        missing = [name for name, known in zip(_PARTS, told[:-1], strict=True) if not known]
        raise PlanError(f"nothing was measured that tells what {', '.join(missing)} take")
    scale = np.where(told, np.abs(counts).max(axis=0), 1.0)
    found = _least_squares(counts / scale) / scale
    *values, front = (float(value) for value in found)
    parts = dict(zip(_PARTS, values, strict=True))
    for name in ("batch", "prompt_token"):
        parts[name] = max(parts[name], _LEAST_S)
    return StepParts(**parts), front if front_s is None else front_s


def _least_squares(counts: np.ndarray) -> np.ndarray:
    """Returns what is not negative and makes ``counts`` times it nearest to 1.

    The best answer leaves some parts at 0 and is the best one of the others, so each choice of parts is tried.
    """
    rows, width = counts.shape
    wanted, best, least = np.ones(rows), np.zeros(width), math.inf
    for chosen in itertools.product((False, True), repeat=width):
        kept = np.flatnonzero(chosen)
        found = np.zeros(width)
        found[kept] = np.linalg.lstsq(counts[:, kept], wanted, rcond=None)[0]
        error = float(np.sum((counts @ found - wanted) ** 2))
        if error < least and (found >= 0).all():
            best, least = found, error
    return best


def spread_of(batches: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns evenly spaced quantiles of ratios, each in the middle of its share, with a mean of 1.

    Each batch counts as much as another: the many gaps of large ones would hide by how much small ones differ.
    """
    if not batches:
        return (1.0,)
    evenly = np.concatenate([np.quantile(np.array(ratios), _middles(_OF_EACH)) for ratios in batches])
    found = np.quantile(evenly, _middles(_PLACES))
    found = np.maximum(found, _LEAST_TIMES * found.mean())
    return tuple(float(value) for value in found / found.mean())


def _middles(places: int) -> np.ndarray:
    middles: np.ndarray = (np.arange(places) + 0.5) / places
    return middles
