"""Plays one cell of the table: brings a request to its phase, injects the fault, and checks the promise."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab.fault_matrix.client import Client
from lab.fault_matrix.effects import (
    CorruptBlock,
    FullDisk,
    hears_nothing,
    hung,
    is_slow,
    is_still_stopped,
    kills,
    stops,
    was_killed,
)
from lab.fault_matrix.engine_program import HOLD, POISON, POISONED_POSITION
from lab.fault_matrix.models import BLOCK_SIZE
from lab.fault_matrix.stage import MAX_IN_FLIGHT, Server, Stage, children_of
from lab.fault_matrix.table import Cell, Fault, Phase, Promise, Victim
from pdserve_proxy.continuation.losses import MAX_LOSSES
from tests.eventually import eventually
from tests.tiny_models import VOCAB_SIZE, Reference

PROMPT_TOKENS = 900
SOME_TOKENS = 5
SILENCE_S = 1.5
"""A client that may ask another proxy gives the first one up after so many seconds of silence."""
SLOW_S = 0.04
BLOCKS = -(-PROMPT_TOKENS // BLOCK_SIZE)
"""The blocks of a prompt."""
HOGS = MAX_IN_FLIGHT


def _prompt(length: int = PROMPT_TOKENS, **at: int) -> tuple[int, ...]:
    """Returns a prompt of ordinary tokens, with ``HOLD`` and ``POISON`` where ``at`` says."""
    tokens = random.Random(7).choices(range(7, VOCAB_SIZE), k=length)
    for name, place in at.items():
        tokens[place] = {"hold": HOLD, "poison": POISON}[name]
    return tuple(tokens)


PLAIN = _prompt()
ANY = _prompt(12)
HELD_AT_ONCE = _prompt(hold=3)
"""Its engine is held before any block is computed."""
HELD_IN_THE_END = _prompt(hold=-3)
"""Its engine is held when most blocks are on their way."""
SHORT = _prompt(12, hold=3)
"""The decode node computes it itself, and is held."""
POISONED = _prompt(poison=3)
POISONED_IN_THE_END = _prompt(poison=-3)
POISONED_WHILE_HELD = _prompt(hold=3, poison=200)
POISONED_ANSWER = _prompt(POISONED_POSITION - 20)
"""Its engine ends some tokens behind the prompt."""


class Answers:
    """The right answers, by transformers."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._known: dict[tuple[int, ...], list[int]] = {}

    def to(self, prompt: Sequence[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self._reference.answer(list(key))
        return self._known[key]


@dataclass
class Scene:
    """A request in its phase, and who has it."""

    client: Client
    victim: Server
    prefill: Server | None = None
    decode: Server | None = None


class Scenario:
    """One cell on one stage."""

    def __init__(self, stage: Stage, cell: Cell, answers: Answers) -> None:
        self._stage = stage
        self._cell = cell
        self._answers = answers
        self._hogs: list[Client] = []
        self._pids: list[int] = []
        """The processes that the fault is for: those of the victim, or its last rank, which shares the node's disk."""
        self._undo = ExitStack()

    def play(self) -> float:
        """Returns how long the client has waited for what the fault held up. The cluster is whole again then."""
        if self._cell.promise is Promise.REFUSED:
            return self._play_poison()
        with self._undo:
            scene = self._scene()
            # Those of a victim that drains are not all there for long.
            self._pids = self._struck(scene.victim)
            self._drain(scene)
            since_s = time.monotonic()
            self._inject(scene)
            assert not scene.client.over, "the answer had its end before the fault came"
            for client in (scene.client, *self._hogs):
                if len(client.urls) > 1:
                    client.lose_patience()
            self._stage.open_gate()
            scene.client.wait()
            self._check_complete(scene.client)
            if self._cell.promise is Promise.ASKS_AGAIN:
                assert scene.client.tries > 1, "the fault did not concern the request"
        for hog in self._hogs:
            hog.wait()
            self._check_complete(hog)
        self._stage.mend()
        return scene.client.longest_pause_s(since_s)

    def _check_complete(self, client: Client) -> None:
        assert all(refusal.invites for refusal in client.refusals), client.refusals
        assert client.over, f"the answer has no end; {len(client.tokens)} tokens, {client.refusals}"
        assert client.tokens == self._answers.to(client.prompt)

    def _struck(self, victim: Server) -> list[int]:
        """Returns the processes that the fault is for."""
        match self._cell.fault:
            case Fault.OOM_KILL:
                # The kernel would choose the same: what has most memory.
                chosen = max(victim.pids, key=_oom_score)
                ranks = children_of(victim.engine) if self._of_rank else []
                assert chosen in (victim.engine, *ranks), "the engine has most memory"
                return [chosen]
            case Fault.HANG:
                return [victim.engine]
            case _ if self._of_rank and self._cell.fault is not Fault.DISK_FULL:
                # A stage of ranks has two: the engine is one, and its child the last.
                (rank,) = children_of(victim.engine)
                return [rank]
            case _:
                return victim.pids

    # ------------------------------------------------------------ a request in its phase

    def _client(self, prompt: Sequence[int]) -> Client:
        """Sends a request. Only where a proxy fails may the client ask again."""
        urls = [proxy.url for proxy in self._stage.proxies]
        if self._cell.promise is Promise.ASKS_AGAIN:
            return Client(urls, prompt, SILENCE_S)
        return Client(urls[:1], prompt)

    def _hog(self, prompt: Sequence[int], proxy: int = 0) -> None:
        urls = [server.url for server in self._stage.proxies]
        asks_again = self._cell.promise is Promise.ASKS_AGAIN
        # Otherwise the nodes take turns, so that two requests are at two nodes.
        one = Client(urls, prompt, SILENCE_S) if asks_again else Client([urls[proxy]], prompt, event_ids=False)
        self._hogs.append(one)

    def _under_way(self, server: Server) -> float:
        return self._stage.proxies[0].metric("proxy_node_requests_in_flight", node=server.name)

    def _of_role(self, role: str) -> dict[str, float]:
        return {server.name: self._under_way(server) for server in self._stage.of_role(role)}

    def _scene(self) -> Scene:
        match self._cell.phase:
            case Phase.QUEUED:
                return self._queued()
            case Phase.PREFILL:
                return self._held(HELD_AT_ONCE)
            case Phase.TRANSFER:
                return self._held(HELD_IN_THE_END, BLOCKS * self._stage.model.block_bytes // 3)
            case Phase.DECODE:
                return self._decoding()
            case Phase.DRAIN if self._role() == "prefill":
                return self._held(HELD_AT_ONCE)
            case Phase.DRAIN:
                return self._decoding()

    def _role(self) -> str:
        """Returns the role of the victim's node."""
        match self._cell.victim:
            case Victim.PROXY:
                return "proxy"
            case Victim.PREFILL:
                return "prefill"
            case Victim.RANK if self._cell.phase not in (Phase.DECODE, Phase.DRAIN):
                return "prefill"
            case _:
                return "decode"

    def _queued(self) -> Scene:
        role, proxy = self._role(), self._stage.proxies[0]
        self._stage.close_gate()
        if role == "proxy":
            for _ in range(MAX_IN_FLIGHT):
                self._hog(SHORT)
            eventually(lambda: sum(self._of_role("decode").values()) == MAX_IN_FLIGHT, "the proxy is full")
            client = self._client(PLAIN)
            eventually(lambda: proxy.metric("proxy_requests_queued") == 1, "the request waits at the proxy")
            return Scene(client, proxy)
        every = self._stage.of_role(role)
        while len(self._stage.held(role)) < len(every):
            node = self._sent_to(role, lambda: self._hog(HELD_AT_ONCE if role == "prefill" else SHORT))
            eventually(lambda: node in self._stage.held(role), "the node is held")  # noqa: B023
        clients: list[Client] = []
        return Scene(victim=self._sent_to(role, lambda: clients.append(self._client(PLAIN))), client=clients[0])

    def _sent_to(self, role: str, send: Callable[[], None]) -> Server:
        """Sends a request, and returns the node of this role that has it."""
        before = self._of_role(role)
        send()

        def where() -> Server | None:
            now = self._of_role(role)
            return next((node for node in self._stage.of_role(role) if now[node.name] > before[node.name]), None)

        return eventually(where, "the request is at a node")

    def _held(self, prompt: Sequence[int], sent: int = 0) -> Scene:
        self._stage.close_gate()
        wire = self._stage.network.wire
        pairs = [(a.name, b.name) for a in self._stage.of_role("prefill") for b in self._stage.of_role("decode")]
        before = {pair: wire.path(*pair).passed for pair in pairs}
        client = self._client(prompt)

        def holder() -> Server | None:
            assert not client.refusals, client.refusals
            # It would be held until its engine counts as one that hangs: another node is lost than that of the fault.
            assert not self._stage.held("decode"), "the decode node has it computed by no prefill node"
            return next(iter(self._stage.held("prefill")), None)

        prefill = eventually(holder, "a prefill node computes it")
        decode = self._decoder()
        pair = (prefill.name, decode.name)
        eventually(lambda: wire.path(*pair).passed - before[pair] >= sent, "its blocks are on their way")
        return self._scene_of(client, prefill, decode)

    def _decoding(self) -> Scene:
        self._stage.close_gate()
        client = self._client(PLAIN)

        def is_held() -> bool:
            assert not client.refusals, client.refusals
            return len(client.tokens) >= SOME_TOKENS and bool(self._stage.held("decode"))

        eventually(is_held, "tokens come, and the engine is held in the middle of the answer")
        return self._scene_of(client, self._stage.of_role("prefill")[0], self._decoder())

    def _decoder(self) -> Server:
        def found() -> Server | None:
            return next((node for node in self._stage.of_role("decode") if self._under_way(node)), None)

        return eventually(found, "a decode node has it")

    def _scene_of(self, client: Client, prefill: Server, decode: Server) -> Scene:
        victims = {"proxy": self._stage.proxies[0], "prefill": prefill, "decode": decode}
        return Scene(client, victims[self._role()], prefill, decode)

    def _drain(self, scene: Scene) -> None:
        if self._cell.phase is Phase.DRAIN:
            scene.victim.draining = True
            scene.victim.process.popen.terminate()

    # ------------------------------------------------------------ faults

    def _inject(self, scene: Scene) -> None:
        victim, wire = scene.victim, self._stage.network.wire
        match self._cell.fault:
            case Fault.SIGKILL | Fault.OOM_KILL:
                self._kill(victim, self._pids[-1])
            case Fault.SIGSTOP:
                self._stop(victim)
            case Fault.HANG:
                self._hang(victim)
            case Fault.CUT:
                self._undo.callback(wire.mend)
                for path in wire.around(victim.name):
                    path.cut = True
                self._undo.callback(hears_nothing(self._stage, victim))
            case Fault.SLOW:
                self._undo.callback(wire.mend)
                for path in wire.around(victim.name):
                    path.delay_s = SLOW_S
                self._undo.callback(is_slow(self._stage, victim))
            case Fault.CORRUPT:
                assert scene.prefill is not None
                assert scene.decode is not None
                self._undo.callback(CorruptBlock(self._stage, scene.prefill, scene.decode).check)
            case Fault.OUT_OF_KV:
                # A node that drains gets no more requests: the one to which the answer goes does.
                drains = self._cell.phase is Phase.DRAIN
                self._ask_too_much_of(self._stage.of_role(self._role()) if drains else [victim])
            case Fault.DISK_FULL:
                self._fill_disk(victim)
            case Fault.POISON:
                raise AssertionError("the request itself is the fault")

    def _ask_too_much_of(self, nodes: list[Server]) -> None:
        """Sends requests until one of ``nodes`` has to have more blocks than there are: the proxy chooses the nodes."""
        for _ in range(HOGS):
            self._hog(PLAIN, proxy=1)
        while True:
            eventually(self._all_are_placed, "every request is at a node")
            if any(map(self._wants_too_much, nodes)):
                return
            assert len(self._hogs) < 2 * HOGS - 1, "no node has to have more blocks than there are"
            self._hog(PLAIN)

    def _all_are_placed(self) -> bool:
        proxies, nodes = self._stage.proxies, self._stage.of_role("decode")
        at_nodes = [
            proxy.metric("proxy_node_requests_in_flight", node=node.name) for proxy in proxies for node in nodes
        ]
        return sum(at_nodes) + sum(hog.over for hog in self._hogs) > len(self._hogs)

    def _wants_too_much(self, node: Server) -> bool:
        under_way = [proxy.metric("proxy_node_requests_in_flight", node=node.name) for proxy in self._stage.proxies]
        return BLOCKS * sum(under_way) > self._stage.model.blocks

    @property
    def _of_rank(self) -> bool:
        return self._cell.victim is Victim.RANK

    def _kill(self, victim: Server, pid: int) -> None:
        kills(pid)
        self._undo.callback(was_killed, victim, pid)

    def _stop(self, victim: Server) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
            self._undo.callback(_go_on, pid)
        for pid in self._pids:
            stops(pid)
        if self._of_rank:  # the node ends itself, and then its rank
            self._undo.callback(eventually, lambda: victim.process.ended, f"{victim.name} has ended")
        else:
            for pid in self._pids:
                self._undo.callback(is_still_stopped, pid)

    def _hang(self, victim: Server) -> None:
        """Stops the engine alone. Its API process lives, and has to notice."""
        (engine,) = self._pids
        os.kill(engine, signal.SIGSTOP)
        self._undo.callback(hung, victim, engine)
        stops(engine)

    def _fill_disk(self, victim: Server) -> None:
        """Lets no file of the victim grow, as a disk without space would not."""
        before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)) for pid in self._pids}
        disk = FullDisk(self._stage, victim, PLAIN if victim.role == "prefill" else ANY)
        self._undo.callback(disk.check_room)
        for pid in self._pids:
            self._undo.callback(_restore_file_size, pid, before[pid])
        self._undo.callback(disk.check)

    # ------------------------------------------------------------ a request that ends engines

    def _play_poison(self) -> float:
        stage, cell = self._stage, self._cell
        engines = stage.engines()
        self._stage.close_gate()
        prompt: Sequence[int] = POISONED_ANSWER
        if self._role() == "prefill":
            by_phase = {Phase.TRANSFER: POISONED_IN_THE_END, Phase.DRAIN: POISONED_WHILE_HELD}
            prompt = by_phase.get(cell.phase, POISONED)
        since_s = time.monotonic()
        ask = partial(Client, [stage.proxies[0].url], prompt, seed=random.getrandbits(32))
        client = ask()
        if cell.phase is Phase.DRAIN:
            if self._role() == "prefill":
                victim = eventually(lambda: next(iter(stage.held("prefill")), None), "a prefill node computes it")
            else:
                eventually(lambda: client.tokens, "tokens come")
                victim = self._decoder()
            victim.draining = True
            victim.process.popen.terminate()
        stage.open_gate()
        client.wait()
        took_s = time.monotonic() - since_s
        refusal = client.refusal
        assert refusal is not None, "it is no answer"
        assert refusal.code == "upstream_lost", refusal
        again = ask()
        again.wait()
        assert again.refusal is not None
        decoders = {node.name for node in stage.of_role("decode") if not node.draining}
        if self._role() == "decode" and (cell.phase is Phase.DRAIN or again.refusal.code == "no_route"):
            # Both decode nodes are lost, or one is and the other has drained: there is none to try.
            assert (again.refusal.status, again.refusal.code) == (503, "no_route")
            eventually(lambda: decoders <= set(stage.lost_since(engines)), "every decode node is lost")
        else:
            assert (again.refusal.status, again.refusal.code) == (400, "suspected_request")
            assert refusal.request_id in again.refusal.message
            assert _says_how(again.refusal.message), again.refusal
        drained = {node.name for node in stage.nodes if node.draining}

        def lost() -> list[str]:
            return [name for name in stage.lost_since(engines) if name not in drained]

        eventually(lambda: len(lost()) >= MAX_LOSSES - len(drained), "engines are lost")
        for name in lost():
            eventually(partial(_has_ended, stage.servers[name]), f"{name} has ended")
        stage.mend()
        assert len(lost()) <= MAX_LOSSES, f"lost: {lost()}"
        ordinary = Client([stage.proxies[0].url], PLAIN)
        ordinary.wait()
        self._check_complete(ordinary)
        return took_s


def play(stage: Stage, cell: Cell, answers: Answers) -> float:
    """Plays a cell, and returns how long its client has waited for what the fault held up."""
    return Scenario(stage, cell, answers).play()


def _says_how(message: str) -> bool:
    """Whether the message names nodes, and how they were lost with the request."""
    _, colon, how = message.partition("died of: ")
    return bool(colon) and any(name in how for name in ("prefill-", "decode-"))


def _has_ended(server: Server) -> bool:
    return server.process.ended


def _oom_score(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/oom_score").read_text())
    return 0


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _restore_file_size(pid: int, before: tuple[int, int]) -> None:
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
