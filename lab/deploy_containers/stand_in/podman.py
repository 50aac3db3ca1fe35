"""Runs podman."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LABEL = "pdserve-deploy-containers"
"""All containers of this test have it. Its value is the process that runs them."""
_CAP_SYS_RESOURCE = 24


class PodmanError(Exception):
    """Podman did not do what it was asked for."""


@dataclass(frozen=True)
class Podman:
    """Podman, with the options that this machine needs."""

    command: tuple[str, ...]
    limits: tuple[str, ...]
    """Options of ``podman run``."""

    async def __call__(self, *arguments: str, timeout_s: float = 60) -> str:
        """Returns what podman prints. Raises PodmanError if it fails or takes too long."""
        process = await asyncio.create_subprocess_exec(
            *self.command, *arguments, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate()
        except TimeoutError as exc:
            raise PodmanError(f"podman {' '.join(arguments)}: nothing in {timeout_s:g} s") from exc
        finally:
            await end(process)
        if process.returncode:
            raise PodmanError(f"podman {' '.join(arguments)}: status {process.returncode}: {err.decode().strip()}")
        return out.decode().strip()

    @property
    def kept(self) -> tuple[str, ...]:
        """Options of ``podman run`` by which ``remove_all`` knows a container. Its image is one that is here."""
        return ("--label", f"{LABEL}={os.getpid()}", "--pull", "never")

    async def start(self, name: str, arguments: list[str], log: Path) -> int:
        """Runs a container and returns its first process, or 0 if that has ended already."""
        # A kubelet does not ask an image's HEALTHCHECK either.
        run = ("run", "--detach", "--no-healthcheck", "--name", name, *self.kept)
        await self(*run, "--log-driver", "k8s-file", "--log-opt", f"path={log}", *self.limits, *arguments)
        return int(await self("inspect", "--format", "{{.State.Pid}}", name))

    async def status(self, name: str) -> int:
        """Returns the exit status of a container that has ended."""
        return int(await self("wait", name))

    async def remove(self, *names: str) -> None:
        """Ends and removes containers, if they are there."""
        if names:
            await self("rm", "--force", "--time", "0", "--ignore", *names)

    async def remove_all(self) -> None:
        """Removes the containers of this process, and of those that were killed."""
        form = f'{{{{.ID}}}} {{{{index .Labels "{LABEL}"}}}}'
        found = [line.split() for line in (await self("ps", "--all", "--format", form)).splitlines()]
        await self.remove(*(line[0] for line in found if len(line) == 2 and _is_over(int(line[1]))))


def _is_over(pid: int) -> bool:
    """Returns whether the containers of a process are nobody's any more. Its own are asked about when it ends."""
    return pid == os.getpid() or not Path("/proc", str(pid)).exists()


@contextmanager
def watched(pid: int) -> Iterator[asyncio.Event]:
    """Yields an event that is set when a process ends.

    The kernel tells it: ``podman run`` and ``podman wait`` may be late by a minute on a busy machine.
    """
    ended = asyncio.Event()
    try:
        watching = os.pidfd_open(pid) if pid else None
    except ProcessLookupError:
        watching = None
    if watching is None:
        ended.set()
        yield ended
        return
    loop = asyncio.get_running_loop()

    def notice() -> None:
        loop.remove_reader(watching)
        ended.set()

    loop.add_reader(watching, notice)
    try:
        yield ended
    finally:
        loop.remove_reader(watching)
        os.close(watching)


async def end(process: Process) -> None:
    """Ends a process that may still run, and waits until it has."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def podman() -> Podman:
    """Returns podman for this machine. Raises PodmanError if there is none."""
    program = shutil.which("podman")
    if program is None:
        raise PodmanError("there is no podman: apt-get install --no-install-recommends podman runc")
    command = [program, "--events-backend", "file"]
    if not Path("/run/systemd/system").exists():
        command += ["--cgroup-manager", "cgroupfs"]
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        # crun, podman's first choice, refuses cgroups that are not all of version 2.
        command += ["--runtime", "runc"]
    return Podman(tuple(command), _limits())


def _limits() -> tuple[str, ...]:
    """Returns limits that a container can have where root may raise none, which podman would try to."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    if capabilities >> _CAP_SYS_RESOURCE & 1:
        return ()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Some versions of podman swap the two numbers.
    return (f"--ulimit=nofile={files}:{files}", "--ulimit=nproc=4096:4096")
