"""Defects to put into the product, each of the kind that reviews have found, with a seed that finds it.

A mutant replaces a line or two of one method. ``python -m lab.simulation.defects.mutants`` looks for the first seed
that kills each of them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lab.simulation.plan import plan_of
from lab.simulation.run import run_plan

CONNECTORS = "pdserve.engine.kv_connector"
KV_CACHE = "pdserve.engine.kv_cache"
SESSION = "pdserve_kvtransfer.fetch.session"


class GoneLine(Exception):
    """The product has changed, so that the mutant's line is not there any more."""


@dataclass(frozen=True)
class Change:
    """In ``method`` of ``owner``, which is a class or a module, ``before`` is replaced by ``after``."""

    owner: str
    method: str
    before: str
    after: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Raises GoneLine."""
        module_name, _, name = self.owner.rpartition(".")
        try:
            owner = getattr(importlib.import_module(module_name), name)
            original = vars(owner)[self.method]
        except (ImportError, AttributeError, KeyError) as exc:
            raise GoneLine(f"{self.owner}.{self.method} is not there any more") from exc
        function: Any = original.fget if isinstance(original, property) else original
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.before) != 1:
            raise GoneLine(f"{self.owner}.{self.method} has {self.before!r} not exactly once any more")
        made: dict[str, Any] = {}
        exec(source.replace(self.before, self.after), function.__globals__, made)
        setattr(owner, self.method, made[self.method])
        try:
            yield
        finally:
            setattr(owner, self.method, original)


@dataclass(frozen=True)
class Mutant:
    """A defect: a change, and ``more`` of them where two mends keep the same thing from happening."""

    what: str
    seed: int
    owner: str
    method: str
    before: str
    after: str
    more: tuple[Change, ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Raises GoneLine."""
        with ExitStack() as stack:
            for change in (Change(self.owner, self.method, self.before, self.after), *self.more):
                try:
                    stack.enter_context(change.applied())
                except GoneLine as exc:
                    raise GoneLine(f"{exc}: {self.what}") from exc
            yield

    def killed_by(self, seed: int) -> bool:
        with self.applied():
            return bool(run_plan(seed, plan_of(seed)).violations)


MUTANTS = (
    Mutant(
        "a wrong draft is accepted",
        70_000,
        "pdserve.engine.scheduling.scheduler.Scheduler",
        "_take_with_drafts",
        "token.token_id != drafts[number]",
        "token.token_id + 1 == drafts[number]",
    ),
    Mutant(
        "blocks with wrong drafts are found in the prefix cache",
        70_003,
        "pdserve.engine.scheduling.scheduler.Scheduler",
        "_take_with_drafts",
        "self._blocks.computed(request, before + number)",
        "self._blocks.computed(request, before + len(drafts))",
    ),
    Mutant(
        "a state after wrong drafts is gone on with",
        70_000,
        f"{KV_CACHE}.block_manager.BlockManager",
        "next_states",
        "held.drafted.pop(0)",
        "held.drafted.pop()",
    ),
    Mutant(
        "a state after a rejected draft stays",
        70_000,
        "pdserve.engine.scheduling.scheduler.Scheduler",
        "_take_with_drafts",
        "self._blocks.drop_drafts(request)",
        "pass",
    ),
    Mutant(
        "a state stays that of the step before",
        60_001,
        f"{KV_CACHE}.block_manager.BlockManager",
        "next_states",
        "held.present, held.next = written, NONE",
        "self._drop(written); held.next = NONE",
    ),
    Mutant(
        "a window's block is given back while the next token sees it",
        60_000,
        f"{KV_CACHE}.block_manager.BlockManager",
        "give_back",
        "held.give_back(pool.spec.needed(computed, self.block_size).start)",
        "held.give_back(pool.spec.needed(computed, self.block_size).start + 1)",
    ),
    Mutant(
        "a prefix is found without the state behind it",
        60_001,
        f"{KV_CACHE}.block_manager.BlockManager",
        "_prefix_in",
        "if block_of(hashes[count - 1]) is not None",
        "if True",
    ),
    Mutant(
        "a state within a block is found as the one behind it",
        60_003,
        f"{KV_CACHE}.block_tables.BlockTables",
        "_filled",
        "if pool.keeps_states and request.num_computed_tokens == end * self.block_size:",
        "if pool.keeps_states:",
    ),
    Mutant(
        "tokens that are replayed begin with the same state",
        60_014,
        f"{KV_CACHE}.block_table",
        "_states_of",
        "left[min(number, len(left)) - 1]",
        "held.present",
    ),
    Mutant(
        "a state is sent before the prompt is computed",
        60_003,
        f"{KV_CACHE}.block_table.BlockTable",
        "_block_of",
        "return held.next if held.next != NONE else held.present",
        "return held.present if held.present != NONE else held.next",
    ),
    Mutant(
        "digests are not compared",
        22,
        f"{SESSION}.Aggregator",
        "_note",
        "if expected != digest:",
        "if False:",
    ),
    Mutant(
        "the prefix cache forgets the salt",
        0,
        "pdserve.engine.kv_cache.block_tables.BlockTables",
        "_hash",
        "request.terms.prompt.cache_salt",
        '""',
    ),
    Mutant(
        "windows and states of another salt are found",
        60_002,
        "pdserve.engine.kv_cache.block_tables.BlockTables",
        "_hash",
        "request.terms.prompt.cache_salt",
        '""',
    ),
    Mutant(
        "a block that is not full is found in the prefix cache",
        1,
        "pdserve.engine.kv_cache.block_tables.BlockTables",
        "admit",
        "request.num_computed_tokens = len(found) * self.block_size",
        "request.num_computed_tokens = len(found) * self.block_size + 1",
    ),
    Mutant(
        "the holders of a shared block are not counted",
        1,
        "pdserve.engine.kv_cache.block_manager.BlockManager",
        "_share",
        "self._holders[block] += 1",
        "self._holders[block] = 1",
    ),
    Mutant(
        "a request's first block is never freed",
        0,
        "pdserve.engine.kv_cache.block_manager.BlockManager",
        "free",
        "reversed(block_table):",
        "reversed(block_table[1:]):",
    ),
    Mutant(
        "a failed fetch counts one block too many as landed",
        4,
        f"{CONNECTORS}.prompt_fetcher.PromptFetcher",
        "_retry",
        "landed_blocks += request.first_block",
        "landed_blocks += request.first_block + 1",
    ),
    Mutant(
        "a cancelled push keeps its blocks",
        0,
        f"{CONNECTORS}.prompt_pusher.PromptPusher",
        "_ended",
        "self._blocks.free(self._cancelled_blocks.pop(transfer))",
        "self._cancelled_blocks.pop(transfer)",
    ),
    Mutant(
        "a push's blocks are freed while they are sent",
        0,
        f"{CONNECTORS}.prompt_pusher.PromptPusher",
        "release",
        "request.block_table = BlockTable()",
        "self._blocks.free(BlockTable(request.block_table)); request.block_table = BlockTable()",
    ),
    Mutant(
        "a cancelled fetch keeps its blocks",
        1,
        f"{CONNECTORS}.prompt_fetcher.PromptFetcher",
        "_free_cancelled",
        "self._blocks.free(self._cancelled_blocks.pop(transfer))",
        "self._cancelled_blocks.pop(transfer)",
    ),
    Mutant(
        "a cancelled fetch's blocks are freed at once",
        1,
        f"{CONNECTORS}.prompt_fetcher.PromptFetcher",
        "release",
        "request.block_table = BlockTable()",
        "self._blocks.free(BlockTable(request.block_table)); request.block_table = BlockTable()",
    ),
    Mutant(
        "a holder keeps the blocks that it has given",
        1,
        f"{CONNECTORS}.cached_blocks.CachedPusher",
        "ended",
        "self._blocks.free(self._pushes.pop(event.transfer_id).table)",
        "self._pushes.pop(event.transfer_id)",
    ),
    Mutant(
        "a lease is compared the wrong way",
        1,
        "pdserve_kvtransfer.sides.Lease",
        "expired",
        "now >= self.until",
        "now < self.until",
    ),
    Mutant(
        "a request past its deadline or without a client stays with its prefill node",
        16,
        "pdserve_kvtransfer.push.session.PushSession",
        "on_cancel",
        "if self.state is not PushState.PUSHING:",
        "if True:",
    ),
    Mutant(
        "a ticket is taken twice",
        27,
        "pdserve.control.frame.Opener",
        "_check_first_use",
        "if not self._counters_of(frame.sender).use(frame.counter):",
        "if False:",
    ),
    Mutant(
        "a ticket for another node is taken",
        6,
        "pdserve.api.node.serving_node.TicketGate",
        "admit",
        "if ticket.node != self._boot_id:",
        "if False:",
    ),
    Mutant(
        "a request that has ended counts as under way",
        0,
        "pdserve_proxy.records.access_log.RequestCounts",
        "ended",
        "self.under_way.pop(relayed, None)",
        "pass",
    ),
    Mutant(
        "a journal keeps its part of the budget",
        0,
        "pdserve_proxy.continuation.journal.RelayJournal",
        "free",
        "self._budget.give_back(self._taken)",
        "pass",
    ),
)
"""Those that are found within a few seeds, from their own on."""

RARE = (
    Mutant(
        "a stream that its node ends with an error counts as answered",
        1213,
        "pdserve_proxy.relay.event_stream.EventStream",
        "end",
        "failed or RelayOutcome.OK",
        "RelayOutcome.OK",
    ),
    Mutant(
        "a more urgent request waits behind the others at a node",
        0,
        "pdserve.engine.scheduling.queues.Queues",
        "_insert",
        "self.waiting[-1].turn_at <= request.turn_at",
        "True",
    ),
    Mutant(
        "a more urgent request waits behind the others at the proxy",
        139,
        "pdserve_proxy.requests.admission_queue.AdmissionQueue",
        "enter",
        "insort(self._waiting, entry, key=_turn)",
        "self._waiting.append(entry)",
    ),
    Mutant(
        "a request that has ended counts twice",
        0,
        "pdserve_proxy.records.access_log.RequestCounts",
        "ended",
        "self.outcomes[relayed.outcome] += 1",
        "self.outcomes[relayed.outcome] += 2",
    ),
    Mutant(
        "an attempt that has ended counts as load",
        0,
        "pdserve_proxy.routing.attempts.Attempt",
        "end_everywhere",
        "self._attempts.end(boot_id, count)",
        "pass",
    ),
    Mutant(
        "a request keeps its place at the proxy",
        14,
        "pdserve_proxy.requests.admission_queue.AdmissionQueue",
        "leave",
        "self._places_taken -= entry.places",
        "pass",
    ),
    Mutant(
        "a generated token counts twice",
        70,
        "pdserve.engine.scheduling.scheduler.Scheduler",
        "accept_token",
        "self.counters.generated_tokens += 1",
        "self.counters.generated_tokens += 2",
    ),
    Mutant(
        "a fetched prompt counts where it was computed, too",
        70,
        "pdserve.engine.scheduling.scheduler.Scheduler",
        "_count_prompt",
        "request.serves_push or ",
        "",
    ),
    Mutant(
        "Done is said before the last block has landed",
        1,
        f"{SESSION}.FetchSession",
        "_finish_if_complete",
        "if self.all_sent is None or not self._landings.complete:",
        "if self.all_sent is None:",
    ),
    Mutant(
        "an answer begins anew after its first byte",
        21,
        "pdserve.control.journal.Journal",
        "emitted",
        "self.choices[choice].token_ids)",
        "self.choices[choice].token_ids[:0])",
    ),
    Mutant(
        "a cancelled fetch's blocks are freed twice",
        1,
        f"{CONNECTORS}.prompt_fetcher.PromptFetcher",
        "_free_cancelled",
        "self._blocks.free(self._cancelled_blocks.pop(transfer))",
        "table = self._cancelled_blocks.pop(transfer); self._blocks.free(list(table)); self._blocks.free(table)",
    ),
    Mutant(
        "all answers to a prompt are drawn with one seed",
        15,
        "pdserve.engine.request.Request",
        "add_child",
        "seed=seed",
        "seed=self.sampling.seed",
    ),
    Mutant(
        "a prompt whose tokens are to be scored is taken from the prefix cache",
        91,
        "pdserve.engine.kv_cache.block_tables.BlockTables",
        "find",
        "if request.needs_scores:",
        "if False:",
    ),
    Mutant(
        "the last block of a prompt is not copied for its second answer",
        1,
        "pdserve.engine.kv_cache.block_tables.BlockTables",
        "fork",
        "if rest:",
        "if False:",
    ),
    Mutant(
        "an answer shows its stop string",
        0,
        "pdserve.api.answers.stop_strings.StopStrings",
        "add",
        "return text[: end + 1 if self._include else end + 1 - state.matched]",
        "return text[: end + 1]",
    ),
    Mutant(
        "a fetch is over before its last block has landed",
        23,
        f"{SESSION}.Aggregator",
        "complete",
        "self._left == 0",
        "self._left <= 1",
    ),
    Mutant(
        "a failed fetch of cached blocks counts one block too many as landed",
        21,
        f"{CONNECTORS}.cached_blocks.CachedFetcher",
        "on_event",
        "+ landed * self._blocks.block_size",
        "+ (landed + 1) * self._blocks.block_size",
    ),
    Mutant(
        "a prefill node's first token counts although the client has one",
        61,
        f"{CONNECTORS}.prompt_fetcher.PromptFetcher",
        "_accept",
        " and request.num_generated_tokens == 0",
        "",
    ),
    Mutant(
        "a journal's last token is generated again",
        21,
        "pdserve.control.journal.Journal",
        "emitted",
        "self.choices[choice].token_ids)",
        "self.choices[choice].token_ids[:-1])",
    ),
    Mutant(
        "the last entry of a journal does not reach the node that goes on",
        21,
        "pdserve_proxy.continuation.journal.RelayJournal",
        "lines",
        "_lines(self.entries)",
        'bytes(_lines(self.entries[: self.entries.rfind(b":")]))',
    ),
    Mutant(
        "a request whose fetch has failed is not queued again",
        4,
        "pdserve.engine.scheduling.scheduler.Scheduler",
        "requeue",
        "self._queues.move(request, Status.WAITING)",
        "pass",
    ),
    Mutant(
        "a client that leaves is not noticed by its engine",
        23,
        "pdserve.engine.step_loop.StepLoop",
        "_abort",
        "self._scheduler.abort(request)",
        "request.deadline += 1_000.0",
    ),
    Mutant(
        "an answer that was over when it came goes on",
        828,
        "pdserve.engine.scheduling.scheduler.Scheduler",
        "finish_if_resumed_over",
        "self.finish_if_over(request)",
        "pass",
    ),
    Mutant(
        "the signature of a frame is not looked at",
        13,
        "pdserve.control.frame.Opener",
        "_authentic",
        "if not any(",
        "if False and any(",
    ),
)
"""Those that many seeds may be needed for, or that are like the first ones."""

UNFOUND: tuple[Mutant, ...] = (
    Mutant(
        "a push that is over ends once more",
        0,
        "pdserve_kvtransfer.push.session.PushSession",
        "_settle",
        "if self.state is not PushState.PUSHING:",
        "if False:",
    ),
)
"""Those that no seed has found, because no engine brings them that keeps to the protocol.

``tests/kvtransfer/test_push_session.py`` has the events in any order, and finds this one.
"""
ALL = (*MUTANTS, *RARE, *UNFOUND)


def main() -> int:
    """Prints the first seed that kills each of ``ALL``, among as many as the argument says."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    survived = 0
    for mutant in ALL:
        try:
            seed = next((seed for seed in range(count) if mutant.killed_by(seed)), None)
        except GoneLine as exc:
            print(exc, flush=True)
            survived += 1
            continue
        survived += seed is None
        print(f"{'survives' if seed is None else seed}: {mutant.what}", flush=True)
    return survived


if __name__ == "__main__":
    sys.exit(main())
