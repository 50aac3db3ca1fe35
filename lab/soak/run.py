"""Runs a soak: the reference answers, the load, the faults, and the rests at which nothing may be left."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from lab.soak.answers import Answer, Events, add_event, difference, read_body
from lab.soak.catalogue import MODEL, Ask, catalogue, nonsense
from lab.soak.clients import Client, Door, Outcome, Tally
from lab.soak.cluster import KEEP_ANSWERS_S, MAX_BODY, START_S, STOP_S, TENANTS, SoakCluster
from lab.soak.faults import FaultSchedule, Strike
from lab.soak.observing import Look, look
from pdserve.config import CpuKernels
from pdserve.machine.memory import REST_S
from pdserve.process import ServerProcess, pdserve_command
from pdserve.settings import cache_folder
from tests.demo_folder import demo_folder
from tests.processes import clean_environ

VOCABULARY = 49_152
LAYERS = 12
FLAGS = ("--dtype", "fp32", "--max-model-len", "1024", "--disaggregation", "always", "--max-num-seqs", "16")
CROWDS = 3
"""So often the reference node answers everything beside other requests."""
MOST_UNSTEADY = 20
"""At most one request in so many may get another answer beside others than alone."""
LOOK_S = 5.0
RETURNED_S = REST_S + 1.0
"""By then each engine that rests has given its free memory back."""
IDLE_S = 60.0
"""At a rest everything has to be idle within this time, and ``KEEP_ANSWERS_S`` more."""


@dataclass(frozen=True)
class SoakModel:
    """A random model, with the demo model's tokenizer, and steps of a few milliseconds."""

    kv_cache_mib: int
    """A hundred blocks: a few long requests fill them, so that others wait, are preempted or move away."""
    case: str = ""
    """Its family's case among those of the tests; empty for a Llama."""
    layers: tuple[str, ...] = ()


SOAK_MODELS = {
    "llama": SoakModel(3),
    "hybrid": SoakModel(3, "qwen3-next", ("linear_attention", "full_attention") * 3),
    "windowed": SoakModel(4, "gemma2", ("sliding_attention", "full_attention") * 3),
}


class SoakError(Exception):
    """The soak could not be run."""


@dataclass(frozen=True)
class SoakPlan:
    """What is run."""

    minutes: float = 60.0
    seed: int = 1
    clients: int = 10
    fault_pause_s: float = 5.0
    """The mean time between faults; they are as irregular as radioactive decay."""
    rest_every_s: float = 300.0
    each: int = 4
    """Requests of each kind in the catalogue."""
    model: str = "llama"
    """One of ``SOAK_MODELS``."""


@dataclass
class Rest:
    """A time without load and without faults, at which all has to be free."""

    look: Look
    idle_after_s: float
    busy: str = ""
    """What was not idle in time."""


@dataclass
class Soak:
    """All that a run has shown."""

    plan: SoakPlan
    asks: int = 0
    unsteady: int = 0
    """Requests of the catalogue that are not asked: their answers depend on rounding."""
    tally: Tally = field(default_factory=Tally)
    strikes: list[Strike] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    left_at_end: list[str] = field(default_factory=list)
    """What was still there when every process had been told to end."""
    broke_off: str = ""
    """What ended the run before its time."""
    seconds: float = 0.0
    began: float = 0.0


def save_model(folder: Path, kind: str) -> Path:
    """Saves one of ``SOAK_MODELS``."""
    # The imports are here because they load torch.
    from transformers.utils.logging import disable_progress_bar

    from pdserve.engine.runner_loading import cpu_kernels
    from tests.models.tiny_families import save_tiny_chat_family
    from tests.tiny_models import save_tiny_chat_model

    disable_progress_bar()  # type: ignore[no-untyped-call]
    cache = cache_folder(os.environ)
    cpu_kernels(CpuKernels.AUTO, cache)
    model, path = SOAK_MODELS[kind], folder / "model"
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048}
    if not model.case:
        return save_tiny_chat_model(demo_folder(cache), path, num_hidden_layers=LAYERS, **shape)
    layers = {"num_hidden_layers": len(model.layers), "layer_types": list(model.layers)}
    return save_tiny_chat_family(demo_folder(cache), model.case, path, **shape, **layers)


async def run_soak(soak: Soak, folder: Path) -> None:
    """Runs a soak in ``folder``. ``soak`` has all that it has shown also if it raises, as for a cluster that does not
    start: SoakError or TimeoutError.
    """
    try:
        await _run_all(soak, folder)
    except BaseException as exc:
        soak.broke_off = repr(exc)
        raise


async def _run_all(soak: Soak, folder: Path) -> None:
    plan = soak.plan
    model = await asyncio.to_thread(save_model, folder, plan.model)
    asks = catalogue(plan.seed, VOCABULARY, plan.each)
    flags = (*FLAGS, "--kv-cache-mib", str(SOAK_MODELS[plan.model].kv_cache_mib))
    references = await reference_answers(model, asks, folder, flags)
    soak.asks, soak.unsteady = len(references.answers), len(references.unsteady)
    _say(f"{soak.asks} reference answers")
    cluster = SoakCluster(folder, model, flags)
    async with aiohttp.ClientSession() as session:
        try:
            await cluster.start(session)
            steady = [ask for ask in asks if ask.name in references.answers]
            await _run(soak, cluster, session, steady, references.answers)
        finally:
            await cluster.stop()
            soak.surprises = [words for server in cluster.servers.values() for words in server.surprises]
            soak.left_at_end = cluster.clear()


@dataclass
class References:
    """What one undisturbed node answers."""

    answers: dict[str, Answer] = field(default_factory=dict)
    """The answer to each request that is asked in the soak, by its name."""
    unsteady: dict[str, str] = field(default_factory=dict)
    """Requests that are not asked in the soak: how their answers beside others differ from the one alone. In fp32 a sum
    depends on its order, and that on the batch; a drawn token whose place is just between two can become the other."""


async def reference_answers(model: Path, asks: Sequence[Ask], folder: Path, node_flags: Sequence[str]) -> References:
    """Returns what one undisturbed node without drafts answers to each request, alone, and which of them it answers
    otherwise beside others. Raises SoakError if it does not answer, or if more are unsteady than chance allows: that is
    a defect.
    """
    core = str(min(os.sched_getaffinity(0)))
    flags = ("--model", str(model), "--served-model-name", MODEL, "--port", "0", "--cores", core, *node_flags)
    log = (folder / "reference.log").open("w")
    server = ServerProcess(
        "reference",
        pdserve_command("mixed", *flags, "--speculation", "off"),
        clean_environ(OMP_WAIT_POLICY="PASSIVE"),
        lambda _, line: print(line, file=log),
    )
    references = References()
    try:
        async with asyncio.timeout(START_S):
            url = (await server.listening()).url
        async with aiohttp.ClientSession() as session:
            for ask in asks:
                references.answers[ask.name] = await _ask_reference(session, url, ask)
            for number in range(CROWDS):
                await compare_in_crowd(session, url, asks, number, references)
    finally:
        await server.stop(STOP_S)
        log.close()
    for name, what in references.unsteady.items():
        _say(f"{name} is not asked, its answer depends on rounding: {what}")
        del references.answers[name]
    if len(references.unsteady) * MOST_UNSTEADY > len(asks):
        raise SoakError(f"{len(references.unsteady)} of {len(asks)} requests get other answers in a crowd than alone")
    return references


async def compare_in_crowd(
    session: aiohttp.ClientSession, url: str, asks: Sequence[Ask], number: int, references: References
) -> None:
    """Asks everything once more, in an order of its own, some at a time, and nothing of it from the prefix cache."""
    places = asyncio.Semaphore(SoakPlan.clients)

    async def compare(ask: Ask) -> None:
        async with places:
            answer = await _ask_reference(session, url, ask, cache_salt=f"crowd {number}")
        if what := difference(answer, references.answers[ask.name]):
            references.unsteady[ask.name] = what

    async with asyncio.TaskGroup() as crowd:
        for ask in random.Random(number).sample(asks, len(asks)):  # any order will do, the same each time
            crowd.create_task(compare(ask))


async def _ask_reference(session: aiohttp.ClientSession, url: str, ask: Ask, **more: str) -> Answer:
    async with session.post(url + ask.path, json={**ask.body, **more}) as response:
        body = await response.read()
    if response.status != 200:
        raise SoakError(f"{ask.name}: {response.status} {body[:300]!r}")
    return _read(ask, body)


def _read(ask: Ask, body: bytes) -> Answer:
    if not ask.streamed:
        return read_body(ask.path, body)
    answer = Answer()
    for event in Events().feed(body):
        add_event(answer, event)
    if not answer.whole:
        raise SoakError(f"{ask.name}: the reference answer is not whole")
    return answer


async def _run(
    soak: Soak,
    cluster: SoakCluster,
    session: aiohttp.ClientSession,
    asks: Sequence[Ask],
    references: dict[str, Answer],
) -> None:
    plan = soak.plan
    soak.began = began = time.monotonic()
    end = began + 60 * plan.minutes
    faults = FaultSchedule(cluster, plan.seed, plan.fault_pause_s, began)
    soak.strikes = faults.strikes
    doors = [Door(proxy.name, cluster.url(proxy)) for proxy in cluster.proxies]
    bad = nonsense(MAX_BODY)
    clients = [
        Client(
            number,
            plan.seed,
            doors,
            cluster.keys.tenants[TENANTS[number % len(TENANTS)]],
            asks,
            bad,
            references,
            faults,
            soak.tally,
            began,
        )
        for number in range(plan.clients)
    ]
    looking = asyncio.create_task(_keep_looking(soak, cluster, session))
    try:
        # The first rest is early: by then everything has been used once, and what is held then is compared with later.
        rest_at = min(end, began + min(60.0, plan.rest_every_s / 2))
        while True:
            async with asyncio.TaskGroup() as running:
                for client in clients:
                    running.create_task(client.run(rest_at))
                running.create_task(faults.run(session, rest_at))
            soak.rests.append(await _rest(soak, cluster, session))
            _say(_progress(soak))
            if time.monotonic() >= end - LOOK_S:
                break
            rest_at = min(end, time.monotonic() + plan.rest_every_s)
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        soak.seconds = time.monotonic() - began


async def _keep_looking(soak: Soak, cluster: SoakCluster, session: aiohttp.ClientSession) -> None:
    while True:
        soak.looks.append(await look(cluster, session, time.monotonic() - soak.began, soak.tally.requests))
        await asyncio.sleep(LOOK_S)


async def _rest(soak: Soak, cluster: SoakCluster, session: aiohttp.ClientSession) -> Rest:
    """Waits until everything is idle, and stays so until engines have given free memory back, and looks at it."""
    began, idle_from = time.monotonic(), 0.0
    while True:
        now = time.monotonic()
        found = await look(cluster, session, now - soak.began, soak.tally.requests)
        busy = [f"{name}: {inside}" for name, inside in found.inside.items() if not inside.idle]
        busy += [f"{name} does not answer" for name in cluster.servers.keys() - found.inside.keys()]
        if busy:
            idle_from = 0.0
        else:
            idle_from = idle_from or now
            if now - idle_from >= RETURNED_S:
                return Rest(found, idle_from - began)
        if now - began > IDLE_S + KEEP_ANSWERS_S + RETURNED_S:
            return Rest(found, now - began, "; ".join(busy) or "it never stayed idle")
        await asyncio.sleep(0.5)


def _progress(soak: Soak) -> str:
    outcomes = soak.tally.outcomes
    rest = soak.rests[-1]
    return (
        f"{(time.monotonic() - soak.began) / 60:.1f} min: {outcomes.total()} requests, {len(soak.strikes)} faults, "
        f"{outcomes[Outcome.WRONG]} wrong, {outcomes[Outcome.LOST]} lost; idle after {rest.idle_after_s:.1f} s"
        + (f"; BUSY: {rest.busy}" if rest.busy else "")
    )


def _say(words: str) -> None:
    print(words, flush=True)
