"""Secret, API keys and certificates of a running ``pdserve proxy`` are replaced on SIGHUP, in every process of it."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import trustme

from pdserve.control.frame import Opener, Purpose, Secrets
from pdserve.process import parse_listening
from pdserve.wire.discovery import Role
from pdserve.wire.terms import Ticket
from tests.cluster.process_forks import forks
from tests.forks import program_of
from tests.proxy.cluster import HEARTBEAT_MS, node_info, registered
from tests.proxy.fake_node import Exchange, FakeNode

pytestmark = pytest.mark.integration

OLD, NEW = "the-old-secret-of-the-cluster", "the-new-secret-of-the-cluster"
ALICE, BOB = "the-key-that-alice-had", "the-key-that-bob-gets"
AGAIN = "SIGHUP: read again: "
REFUSED = "SIGHUP: nothing is changed, because: "
ASKED = 8
"""Requests, each on a connection of its own, so that every worker has some."""


@dataclass
class Proxy:
    process: asyncio.subprocess.Process
    folder: Path
    url: str = ""
    control: str = ""
    lines: list[str] = field(default_factory=list)

    async def until(self, what: str) -> str:
        """The next line of its log with this in it."""
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            while True:
                line = (await self.process.stderr.readline()).decode()
                assert line, self.lines
                self.lines.append(line)
                if what in line:
                    return line

    async def hang_up(self, expected: str = AGAIN) -> str:
        self.process.send_signal(signal.SIGHUP)
        return await self.until(expected)

    def write(self, name: str, content: str | bytes) -> None:
        (self.folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def certify(self, authority: trustme.CA) -> None:
        _certify(self.folder, authority)


def _certify(folder: Path, authority: trustme.CA) -> None:
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    (folder / "cert.pem").write_bytes(chain)


@asynccontextmanager
async def proxy(folder: Path, workers: int, *flags: str) -> AsyncIterator[Proxy]:
    (folder / "secret").write_text(OLD)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    process = await asyncio.create_subprocess_exec(
        *forks().command("tests.proxy.forked_proxy", forks().socket, "--port", "0", "--control-port", "0"),
        *("--workers", str(workers), "--secret-file", str(folder / "secret"), "--drain-s", "0", *flags),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env=environ,
    )
    running = Proxy(process, folder)
    try:
        found = parse_listening(await running.until("pdserve proxy listening"))
        assert found is not None
        running.url, running.control = found.url, found.control
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(20):
                await process.communicate()
    assert process.returncode == 0, running.lines


async def statuses(url: str, *, key: str = "", tls: ssl.SSLContext | None = None) -> set[int]:
    headers = {"authorization": f"Bearer {key}"} if key else {}

    async def one() -> int:
        connector = aiohttp.TCPConnector(ssl=tls or True)
        async with (
            aiohttp.ClientSession(url, connector=connector) as http,
            http.post("/v1/completions", json={"model": "m"}, headers=headers) as response,
        ):
            return response.status

    return set(await asyncio.gather(*(one() for _ in range(ASKED))))


def workers_of(pid: int) -> list[int]:
    pid = program_of(pid)
    return [program_of(int(child)) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("workers", [1, 2])
async def test_api_keys_are_replaced_in_every_process_and_a_broken_file_changes_nothing(
    tmp_path: Path, workers: int
) -> None:
    (tmp_path / "keys").write_text(ALICE)
    async with proxy(tmp_path, workers, "--api-key-file", str(tmp_path / "keys")) as running:
        assert await statuses(running.url, key=ALICE) == {503}, "let in, and no node there"
        assert await statuses(running.url, key=BOB) == {401}
        running.write("keys", f"bob {BOB}\n")
        assert "1 API key" in await running.hang_up()
        assert "1 API key" in await running.hang_up("SIGHUP: read again, and nothing is new: ")
        while await statuses(running.url, key=BOB) != {503}:
            pass  # Workers get the new secret on their own channel.
        assert await statuses(running.url, key=ALICE) == {401}
        for broken in ("", "short", f"{BOB}\n{BOB}"):
            running.write("keys", broken)
            assert BOB not in await running.hang_up(REFUSED)
        (tmp_path / "keys").unlink()
        await running.hang_up(REFUSED)
        assert await statuses(running.url, key=BOB) == {503}


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_certificate_is_replaced_in_every_process_and_a_broken_one_is_not_taken(
    tmp_path: Path, workers: int
) -> None:
    first, second = trustme.CA(), trustme.CA(key_type=trustme.KeyType.RSA)
    trusting_first, trusting_second = ssl.create_default_context(), ssl.create_default_context()
    first.configure_trust(trusting_first)
    second.configure_trust(trusting_second)
    _certify(tmp_path, first)
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    async with proxy(tmp_path, workers, *files) as running:
        assert await statuses(running.url, tls=trusting_first) == {503}
        running.certify(second)
        await running.hang_up()

        async def all_show_the_second() -> bool:
            try:
                return await statuses(running.url, tls=trusting_second) == {503}
            except aiohttp.ClientConnectorCertificateError:
                return False

        while not await all_show_the_second():
            pass
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await statuses(running.url, tls=trusting_first)
        running.write("cert.pem", "no certificate")
        await running.hang_up(REFUSED)
        assert await statuses(running.url, tls=trusting_second) == {503}


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_secret_is_replaced_in_three_steps_while_a_node_serves(tmp_path: Path, workers: int) -> None:
    tickets: list[str] = []

    async def answer(exchange: Exchange) -> None:
        tickets.append(exchange.request.headers["x-pdserve-ticket"])
        await exchange.answer(200, b"{}")

    async with FakeNode(answer) as node:
        secrets = Secrets(OLD.encode())
        info = node_info("n", Role.MIXED, node.url)
        async with proxy(tmp_path, workers) as running, registered(info, running.control, secret=secrets) as known:

            async def serves() -> None:
                await asyncio.sleep(6 * HEARTBEAT_MS / 1000)  # Three unanswered heartbeats clear the event.
                assert known.registered[running.control].is_set()
                while await statuses(running.url) != {200}:
                    pass  # Workers learn of a node later than the node learns of its proxy.

            await serves()
            for step, signed_with in ((f"{OLD}\n{NEW}\n", OLD), (f"{NEW}\n\n{OLD}", NEW), (NEW, NEW)):
                running.write("secret", step)
                await running.hang_up()
                await serves()
                secrets.renew(step.encode())
                tickets.clear()
                await serves()
                opener = Opener(signed_with.encode(), Purpose.TICKET, Ticket, ordered=False)
                for ticket in tickets:
                    opener.open(base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4)))
                assert len(tickets) >= ASKED
            running.write("secret", f"{OLD}\n{NEW}\nsome-other-secret-of-a-cluster")
            await running.hang_up(REFUSED)
            await serves()
            with pytest.raises(TimeoutError):
                late = node_info("late", Role.MIXED, node.url)
                async with asyncio.timeout(1), registered(late, running.control, secret=OLD.encode()):
                    pass


async def test_a_worker_that_comes_up_later_has_what_was_read_last(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(ALICE)
    async with proxy(tmp_path, 2, "--api-key-file", str(tmp_path / "keys")) as running:
        running.write("keys", BOB)
        await running.hang_up()
        running.write("keys", "broken")
        for child in workers_of(running.process.pid):
            os.kill(child, signal.SIGKILL)
            await running.until("another one is started")
        assert await statuses(running.url, key=BOB) == {503}
        assert await statuses(running.url, key=ALICE) == {401}
        for child in workers_of(running.process.pid):
            os.kill(child, signal.SIGHUP)  # A worker does not act on this signal.
        assert await statuses(running.url, key=BOB) == {503}
        assert not re.search("was killed by SIGHUP", "".join(running.lines))
