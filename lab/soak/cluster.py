"""The cluster under test: two proxies and their nodes, each started again when it has died, as ``pdserve up`` does."""

from __future__ import annotations

import asyncio
import enum
import os
import random
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from lab.soak.catalogue import MODEL
from pdserve.cli.up.supervised_server import FIRST_PAUSE_S
from pdserve.process import ServerProcess, partition_cores, pdserve_command
from pdserve.wire.command import SetRole
from pdserve.wire.discovery import Role
from pdserve_proxy.status.routes import COMMANDS_PATH, NodeOrder
from tests.processes import clean_environ

STOP_S = 30.0
LOST_ENGINE = 1
"""The exit status of a node whose engine has died."""
START_S = 180.0
_ASKING_S = 0.25
TENANTS = ("ash", "birch", "cedar")
MAX_BODY = 1 << 20
KEEP_ANSWERS_S = 10


class Part(enum.Enum):
    """What a server of the cluster is."""

    PROXY = "proxy"
    PREFILL = "prefill"
    DECODE = "decode"


class Known(msgspec.Struct, frozen=True):
    """The part of an entry of a proxy's ``/instances`` that is read here."""

    name: str
    url: str
    role: Role
    boot_id: str
    control: str
    """The address of its engine's transfers."""


@dataclass(frozen=True)
class Keys:
    """The secrets of a run, made for it alone."""

    admin: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    tenants: Mapping[str, str] = field(default_factory=lambda: {name: secrets.token_urlsafe(24) for name in TENANTS})

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Writes the files for ``--api-key-file`` and ``--admin-key-file``, and returns them."""
        tenants, admins = folder / "tenants", folder / "admins"
        for path, keys in ((tenants, self.tenants), (admins, {"soak": self.admin})):
            path.touch(mode=0o600)
            path.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
        return tenants, admins


class Server:
    """One server, which is started again when it has ended, at once and for as long as it is kept."""

    def __init__(self, name: str, part: Part, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.part = part
        self.boots = 0
        self._expected: int | None = None
        self.surprises: list[str] = []
        """What nobody did to it: ends that no fault explains, wrong exit statuses, and defects in its log."""
        self._command = command
        self._environ = environ
        self._log = log.open("a", buffering=1, errors="replace")
        self.process = self._start()

    def _start(self) -> ServerProcess:
        self.boots += 1
        return ServerProcess(self.name, self._command, self._environ, self._relay)

    def _relay(self, name: str, line: str) -> None:
        self._log.write(line + "\n")
        if "Traceback (most recent call last)" in line or " CRITICAL " in line:
            self.surprises.append(f"{self.name}, boot {self.boots}, has a traceback in its log")

    async def ended(self) -> None:
        """Returns once the process that runs now has ended."""
        await self.process.wait()

    def expect_end(self, status: int) -> None:
        """Notes that a fault ends the process now, and with which exit status it has to end."""
        self._expected = status

    @property
    def ending(self) -> bool:
        """Whether a fault has ended the process, or is about to."""
        return self._expected is not None

    def judge_end(self, status: int) -> None:
        """Notes a surprise if the process, which has ended, should not have, or not with this exit status."""
        if self._expected is None:
            self.surprises.append(f"{self.process.died()}")
        elif status != self._expected:
            self.surprises.append(f"{self.process.died()}, where a fault should have made it {self._expected}")
        self._expected = None

    async def keep(self) -> None:
        """Starts the process again whenever it has ended. Runs until it is cancelled."""
        while True:
            status = await self.process.wait()
            self.judge_end(status)
            await self.process.end(0.0)
            await asyncio.sleep(FIRST_PAUSE_S)
            self._log.write(f"--- ended with {status}; boot {self.boots + 1}\n")
            self.process = self._start()

    @property
    def url(self) -> str:
        return self.process.url

    def members(self) -> dict[str, int]:
        """Returns the process ids of the server and all that it has started, by names that say what they are.

        An engine is in a session of its own, so no process group has them all.
        """
        found = {self.name: self.process.pid}
        waiting = [self.process.pid]
        while waiting:
            for pid in _children(waiting.pop()):
                found[f"{self.name} {_purpose(pid)}"] = pid
                waiting.append(pid)
        return found

    @property
    def engine(self) -> int:
        """The process id of a node's engine. Raises LookupError if it has none now."""
        return self.members()[f"{self.name} engine"]

    async def stop(self) -> None:
        running = self.process.alive
        await self.process.stop(STOP_S)
        if running and not self.ending:
            self.expect_end(0)
            self.judge_end(await self.process.wait())
        self._log.close()


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for children in lists for child in children.read_text().split()]
    return []


def _purpose(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for word in words:
            if word.startswith(b"pdserve."):
                return word.decode().removeprefix("pdserve.")
    return "child"


class SoakCluster:
    """Two proxies, prefill and decode nodes. ``start`` returns when all know each other."""

    def __init__(self, folder: Path, model: Path, flags: Sequence[str], *, prefill: int = 2, decode: int = 2) -> None:
        self.keys = Keys()
        self.folder = folder
        self._model = model
        self._flags = flags
        self._planned = [(Part.PREFILL, f"prefill-{index}") for index in range(prefill)]
        self._planned += [(Part.DECODE, f"decode-{index}") for index in range(decode)]
        self.servers: dict[str, Server] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        # In memory, as where UCX has its files by itself, but apart from those of others.
        self.shared = Path(tempfile.mkdtemp(prefix="pdserve-soak-", dir="/dev/shm"))
        self._environ = clean_environ(
            PDSERVE_SECRET=secrets.token_hex(32),
            TMPDIR=str(self.temporary),
            UCX_POSIX_DIR=str(self.shared),
            OMP_WAIT_POLICY="PASSIVE",
        )

    @property
    def proxies(self) -> list[Server]:
        return [server for server in self.servers.values() if server.part is Part.PROXY]

    @property
    def nodes(self) -> list[Server]:
        return [server for server in self.servers.values() if server.part is not Part.PROXY]

    def url(self, proxy: Server) -> str:
        return self._urls[proxy.name]

    async def start(self, session: aiohttp.ClientSession) -> None:
        tenants, admins = self.keys.write(self.folder)
        controls = list[str]()
        self._urls: dict[str, str] = {}
        for index in range(2):
            port, control = _lasting_port(), _lasting_port()
            controls.append(f"tcp://127.0.0.1:{control}")
            self._urls[f"proxy-{index}"] = f"http://127.0.0.1:{port}"
            ports = ("--port", str(port), "--control-port", str(control), "--max-body-bytes", str(MAX_BODY))
            keys = ("--api-key-file", str(tenants), "--admin-key-file", str(admins))
            self._add(f"proxy-{index}", Part.PROXY, pdserve_command("proxy", *ports, *keys))
        cores = partition_cores(sorted(os.sched_getaffinity(0)), len(self._planned))
        for (part, name), own in zip(self._planned, cores, strict=True):
            flags = ("--name", name, "--model", str(self._model), "--served-model-name", MODEL, "--port", "0")
            proxies = [word for control in controls for word in ("--proxy", control)]
            more = ("--cores", ",".join(map(str, own)), "--keep-answers-s", str(KEEP_ANSWERS_S))
            # One of two nodes moves blocks through UCX, the other one by mapping the other's memory.
            mapped = ("--kv-shared-cache", "off" if name.endswith("1") else "on")
            # An answer that one of the decode nodes has begun with drafts may go on without them, and back.
            drafts = ("--speculation", "off" if name == "decode-1" else "auto")
            self._add(name, part, pdserve_command(part.value, *flags, *proxies, *more, *mapped, *drafts, *self._flags))
        self._keeping = [asyncio.create_task(server.keep()) for server in self.servers.values()]
        async with asyncio.timeout(START_S):
            while True:
                if await self.is_complete(session):
                    return
                await asyncio.sleep(_ASKING_S)

    def _add(self, name: str, part: Part, command: Sequence[str]) -> None:
        log = self.folder / f"{name}.log"
        self.servers[name] = Server(name, part, command, self._environ, log)

    async def known(self, session: aiohttp.ClientSession, proxy: Server) -> dict[str, Known]:
        """Returns what a proxy says of its nodes; nothing while it does not answer."""
        try:
            async with session.get(f"{self.url(proxy)}/instances", timeout=_QUICK) as response:
                listed = msgspec.json.decode(await response.read(), type=list[Known])
        except (OSError, TimeoutError, aiohttp.ClientError, msgspec.MsgspecError):
            return {}
        return {entry.name: entry for entry in listed}

    async def is_complete(self, session: aiohttp.ClientSession) -> bool:
        """Returns whether both proxies have every node, as it is now and in its own role."""
        for proxy in self.proxies:
            known = await self.known(session, proxy)
            if not all(is_known(node, known) for node in self.nodes):
                return False
        return True

    async def control(self, session: aiohttp.ClientSession, node: Server) -> str:
        """Returns the address of the node's transfers. Raises LookupError if no proxy knows the node."""
        for proxy in self.proxies:
            entry = (await self.known(session, proxy)).get(node.name)
            if entry is not None:
                return entry.control
        raise LookupError(f"no proxy knows {node.name}")

    async def set_role(self, session: aiohttp.ClientSession, node: Server, role: Role) -> None:
        """Has a proxy give the node another role. Raises aiohttp.ClientError or LookupError if it does not."""
        for proxy in self.proxies:
            entry = (await self.known(session, proxy)).get(node.name)
            if entry is not None:
                order = msgspec.json.encode(NodeOrder(entry.boot_id, SetRole(role)))
                headers = {"authorization": f"Bearer {self.keys.admin}", "content-type": "application/json"}
                async with session.post(self.url(proxy) + COMMANDS_PATH, data=order, headers=headers) as response:
                    response.raise_for_status()
                return
        raise LookupError(f"no proxy knows {node.name}")

    async def stop(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(node.stop() for node in self.nodes))
        await asyncio.gather(*(proxy.stop() for proxy in self.proxies))

    def clear(self) -> list[str]:
        """Removes what the stopped cluster has left outside of ``folder``. Returns all that it has left."""
        left = [str(path) for folder in (self.temporary, self.shared) for path in folder.iterdir()]
        shutil.rmtree(self.shared)
        return left


def is_known(node: Server, known: Mapping[str, Known]) -> bool:
    """Returns whether a proxy that says ``known`` has the node as it is now, in its own role."""
    entry = known.get(node.name)
    return entry is not None and entry.url == node.url and entry.role.value == node.part.value


def _lasting_port() -> int:
    """Returns a free port that the system gives to nobody who asks for any: it is free again after a restart."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("of 100 ports none is free")


_QUICK = aiohttp.ClientTimeout(total=2.0)
