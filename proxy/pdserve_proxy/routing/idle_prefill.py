"""Says when a prefill node answers a request itself, from the prompt to the last token.

Where answers are long and prompts short, a prefill node rests while its decode nodes are full. So it takes a request
that it would only prefill otherwise, if it has no prompt to compute, had few of them lately, and has a smaller share of
its batch in use than the chosen decode node. Then no KV blocks move. A node that is often asked to prefill takes none:
its streams would stand still during each prompt. Nodes that divide the cores of one machine gain nothing by it: a
prefill node that rests lends its cores. The function has no state and does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config import FEW_PROMPTS, PrefillAnswers
from pdserve.wire.discovery import NodeInfo, Role
from pdserve_proxy.routing.candidates import size_of


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A node and what it has to do, as far as this proxy knows."""

    info: NodeInfo
    requests: int
    prompts: int
    """The prompts of this proxy's requests that the node is to compute."""
    queue_s: float
    """How long a prompt would wait there, by the node's last heartbeat: this shows what other proxies have sent."""
    prompt_share: float
    """The share of its latest heartbeats in which it had prompts to compute."""

    def share(self, more: int = 0) -> float:
        """Returns the share of the node's batch that is in use, with so many more requests."""
        return (self.requests + more) / size_of(self.info)


def answers_itself(choice: PrefillAnswers, prefill: NodeWork, decode: NodeWork, answers: int) -> bool:
    """Returns whether ``prefill`` gives so many ``answers`` to a request itself, for which ``decode`` was chosen."""
    if choice is PrefillAnswers.OFF or not _can_replace(prefill.info, decode.info):
        return False
    if choice is PrefillAnswers.AUTO and _share_a_machine(prefill.info, decode.info):
        return False
    rests = not prefill.prompts and not prefill.queue_s and prefill.prompt_share < FEW_PROMPTS
    return rests and prefill.share(answers) <= min(1.0, decode.share())


def _can_replace(prefill: NodeInfo, decode: NodeInfo) -> bool:
    """Returns whether a prefill node takes all requests that ``decode`` takes, and answers them alike."""
    ours, theirs = prefill.capacity, decode.capacity
    longest = min(theirs.max_model_len, theirs.num_blocks * theirs.block_size)
    return (
        prefill.role is Role.PREFILL
        and prefill.answers == decode.answers != ""
        and ours.max_model_len == theirs.max_model_len
        and ours.max_running >= theirs.max_running
        and ours.num_blocks * ours.block_size >= longest
    )


def _share_a_machine(one: NodeInfo, other: NodeInfo) -> bool:
    """Returns whether both compute on cores of the same machine. A node on a GPU names no cores."""
    return one.compute is not None and other.compute is not None and one.compute.machine == other.compute.machine
