"""Runs the commands of the operator's page that bring up a cluster in containers by hand, and those that break it."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from lab.deploy_containers.report import Findings
from lab.deploy_containers.stand_in.podman import Podman

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "containers.md"
IMAGE = "pdserve:0.2.0"
"""What the page calls the image."""
NODES = ("decode-0", "decode-1", "prefill-0", "prefill-1")
PROXIES = ("proxy-0", "proxy-1")
NETWORK = "pdserve"
PORTS = (8000, 8001)
_MARK = "=== block"
_LOOK_S = 0.2


@dataclass(frozen=True)
class Block:
    """One block of commands: what the page has, and what became of it."""

    commands: str
    output: str
    begun: float
    ended: float


def blocks(page: str) -> list[str]:
    """Returns the page's blocks of shell commands, in their order."""
    return re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def script(commands: Sequence[str], runtime: Podman, image: str) -> str:
    """Returns one script of all blocks, which says when each ends. Its ``docker`` is podman."""
    podman, limits = shlex.join(runtime.command), shlex.join((*runtime.kept, *runtime.limits))
    lines = [
        f'docker() {{ case $1 in run) shift; {podman} run {limits} "$@" ;; *) {podman} "$@" ;; esac; }}',
        f"echo '{_MARK}' $EPOCHREALTIME",
    ]
    for block in commands:
        lines += [block.replace(IMAGE, image), f"echo; echo '{_MARK}' $EPOCHREALTIME"]
    return "\n".join(lines) + "\n"


def parted(commands: Sequence[str], output: str) -> list[Block]:
    """Returns what each block printed. A script that ended early has fewer."""
    pieces = re.split(rf"^{_MARK} ([\d.]+)\n", output, flags=re.MULTILINE)
    times = [float(each) for each in pieces[1::2]]
    return [
        Block(text, said, begun, ended)
        for text, said, begun, ended in zip(commands, pieces[2::2], times, times[1:], strict=False)
    ]


@dataclass
class Watch:
    """When the first proxy knew all nodes, as the page's ``whole`` asks, and when it did not."""

    looks: list[tuple[float, bool]] = field(default_factory=list)

    def broken_s(self, begun: float, ended: float) -> float:
        """Returns for how long the cluster was not whole between two times."""
        bad = [at for at, whole in self.looks if begun <= at <= ended and not whole]
        return bad[-1] - bad[0] + _LOOK_S if bad else 0.0


@asynccontextmanager
async def _watched(port: int) -> AsyncIterator[Watch]:
    watch = Watch()

    async def look() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                try:
                    async with session.get(f"http://127.0.0.1:{port}/instances") as response:
                        found = await response.json()
                    whole = sum(node["state"] == "serving" for node in found) == len(NODES)
                except (aiohttp.ClientError, TimeoutError):
                    whole = False
                watch.looks.append((time.time(), whole))
                # Nothing announces it to somebody outside of the cluster.
                await asyncio.sleep(_LOOK_S)

    looking = asyncio.create_task(look())
    try:
        yield watch
    finally:
        looking.cancel()


async def follow_page(runtime: Podman, image: str, folder: Path, found: Findings) -> None:
    """Runs the page's commands in ``folder``, which it makes, and judges what they show."""
    commands = blocks(await asyncio.to_thread(PAGE.read_text))
    await asyncio.to_thread(folder.mkdir)
    await _check_room(runtime)
    try:
        async with _watched(PORTS[0]) as watch:
            done = parted(commands, await _run(script(commands, runtime, image), folder))
    finally:
        await _remove(runtime)
    assert len(done) == len(commands), f"the commands ended in block {len(done)}: {(folder / 'log').read_text()[-500:]}"
    judge(done, watch, found)


async def _run(text: str, folder: Path) -> str:
    """Returns what the script prints, which is also in the file ``log``."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", text, cwd=folder, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    said = b""
    try:
        while line := await process.stdout.readline():
            said += line
        await process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        (folder / "log").write_bytes(said)
    return said.decode()


async def _check_room(runtime: Podman) -> None:
    """Raises AssertionError if a cluster of somebody's stands where the page's commands make one."""
    await runtime.remove_all()
    taken = {*NODES, *PROXIES} & set((await runtime("ps", "--all", "--format", "{{.Names}}")).split())
    assert not taken, f"there are containers called {', '.join(sorted(taken))}, which the page's commands would make"
    for port in PORTS:
        with socket.socket() as tried:
            assert tried.connect_ex(("127.0.0.1", port)), f"port {port}, which the page's commands take, is somebody's"
    # What a run that was killed has left. Podman keeps a network that somebody uses.
    await _remove(runtime)


async def _remove(runtime: Podman) -> None:
    """Removes what the commands make, whether they came to their end or not."""
    await runtime.remove_all()
    await runtime("volume", "rm", "--force", *(f"pdserve-{node}" for node in NODES))
    if NETWORK in (await runtime("network", "ls", "--format", "{{.Name}}")).split():
        await runtime("network", "rm", NETWORK)


EXPECTED = {
    "docker network create": [],
    "whole() {": [],
    "ask hello": ['"status":"ready"', "hello: whole"],
    "pdserve trace hello": ["decode-1", "hello: ok 200", "request_id=hello", 'pdserve_proxy_nodes{role="decode"} 2.0'],
    "crash() {": [],
    "crash decode-0": [
        *(f"decode-dies-{n}: whole" for n in (1, 2, 3)),
        "node lost       decode-0",
        "resumed         decode-0",
        "resumed from=decode-0 to=decode-1",
        'pdserve_proxy_node_failures_total{kind="lost",node="decode-0"}',
    ],
    "crash prefill-0": [
        *(f"prefill-dies-{n}: whole" for n in (1, 2, 3)),
        "node lost       prefill-0",
        "pdserve_fallbacks_total",
    ],
    "crash proxy-0": ["proxy-dies: broken", "proxy-dies: whole", "proxy-dies: ok 200", "proxies changed"],
    "pdserve drain decode-1": [
        *(f"drains-{n}: whole" for n in (1, 2, 3)),
        "decode-1 has ended after",
        "node drains     decode-1",
        "moved           decode-1",
        "node left       decode-1",
        "decode-1 Exited (0)",
    ],
    "docker stop": [*(f"{name} Exited (0)" for name in (*NODES, *PROXIES))],
}
"""What each block has to print, by what it has in itself."""
BREAKS = {
    "crash decode-0": "a decode node dies",
    "crash prefill-0": "a prefill node dies",
    "crash proxy-0": "a proxy dies",
    "pdserve drain decode-1": "a node drains",
}


def judge(done: Sequence[Block], watch: Watch, found: Findings) -> None:
    """Compares what was printed with what the page says, and notes for how long the cluster was not whole."""
    unknown = [block.commands for block in done if not any(word in block.commands for word in EXPECTED)]
    found.check(not unknown, f"nobody judges these commands: {unknown}")
    for word, texts in EXPECTED.items():
        for block in done:
            if word in block.commands:
                for text in texts:
                    found.check(text in block.output, f"{word}: nothing shows {text!r}")
                break
        else:
            found.check(False, f"the page has no commands with {word!r}")
    for block in done:
        for word, what in BREAKS.items():
            if word in block.commands:
                found.figure(
                    "answers that came whole", len(re.findall(": whole$", block.output, re.MULTILINE)), of=what
                )
                gaps = [float(gap) for gap in re.findall(r"gap_s=([\d.]+)", block.output)]
                if gaps:
                    found.figure("longest pause of an answer", max(gaps), "s", of=what)
                found.figure("not all nodes at a proxy for", watch.broken_s(block.begun, block.ended), "s", of=what)
    starts = [block for block in done if "docker network create" in block.commands or "whole() {" in block.commands]
    if starts:
        found.figure("whole after", starts[-1].ended - starts[0].begun, "s")
