"""Drives Chromium over its DevTools protocol, for tests that look at the status page as people do.

No package is needed beside the browser itself: ``apt-get install chromium`` or ``chromium-headless-shell``.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.processes import alive

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
NEEDED = "TESTS_NEED_CHROMIUM"
START_S = 60.0
STEP_S = 30.0
STOP_S = 10.0
FLAGS = (
    "--headless",
    # Tests may run as root in a container, and load their own pages only.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE localhost",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)


def find_chromium() -> str:
    """Returns the browser's program. Without one, the test fails where CI may install it, and is skipped elsewhere.

    ``.ci/run`` sets the variable ``NEEDED`` where it may install packages.
    """
    for name in PROGRAMS:
        found = shutil.which(name)
        if found is not None:
            return found
    why = "no Chromium is installed: apt-get install chromium-headless-shell (or chromium)"
    if NEEDED in os.environ:
        raise AssertionError(why)
    pytest.skip(why)


class PageFailed(Exception):
    """What a test asked of the page could not be done."""


@dataclass
class Page:
    """One tab. The session sends commands to it, and collects what the page complains about."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    """Errors of the page's script, and what its security policy forbade."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    async def listen(self) -> None:
        """Takes what the browser says until it closes the connection."""
        async for message in self.socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["params"]["exceptionDetails"])[:2000])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(STEP_S):
            said = await answer
        if "error" in said:
            raise PageFailed(f"{method}: {said['error']}")
        result: dict[str, Any] = said["result"]
        return result

    async def size(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def goto(self, url: str) -> None:
        """Opens ``url``, and returns when the page and its script are loaded."""
        said = await self.command("Page.navigate", url=url)
        if "errorText" in said:
            raise PageFailed(f"{url}: {said['errorText']}")
        loaded = f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'"
        async with asyncio.timeout(STEP_S):
            while True:
                with suppress(PageFailed):  # the page before it may just have gone
                    if await self.evaluate(loaded):
                        return
                await asyncio.sleep(0.02)

    async def evaluate(self, script: str) -> Any:
        """Returns the value of a JavaScript expression in the page; waits for it if it is a promise."""
        said = await self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise PageFailed(f"{script}: {said['exceptionDetails']}")
        return said["result"].get("value")

    async def until(self, script: str) -> None:
        """Waits until a JavaScript expression is true in the page, which looks again at each of its frames."""
        wait = f"new Promise(done => {{ const look = () => ({script}) ? done(true) : setTimeout(look, 20); look(); }})"
        try:
            await self.evaluate(wait)
        except TimeoutError as exc:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never true in the page: {script}\n{text}\n{self.complaints}") from exc

    async def press(self, key: str, text: str = "") -> None:
        code = {"key": key, "windowsVirtualKeyCode": {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, 0)}
        await self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **code)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **code)

    async def write(self, text: str) -> None:
        await self.command("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        said = await self.command("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        return base64.b64decode(said["data"])


@asynccontextmanager
async def chromium_page() -> AsyncIterator[Page]:
    """Runs a browser with one empty tab, and ends it at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="pdserve-chromium-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            find_chromium(),
            *FLAGS,
            f"--user-data-dir={folder}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                async with http.get("/json/list") as response:
                    (tab,) = [one for one in await response.json() if one["type"] == "page"]
                async with http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=64 * 2**20) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Log"):
                        await page.command(f"{domain}.enable")
                    yield page
                    listening.cancel()
        finally:
            await end_group(process)


async def end_group(process: asyncio.subprocess.Process) -> None:
    """Ends a process that leads a group, and all of the group: a browser has children, and may be a script's child."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    async with asyncio.timeout(STOP_S):
        while True:
            if not any(map(alive, group_members(process.pid))):
                return
            await asyncio.sleep(0.02)


def group_members(group: int) -> list[int]:
    """Returns the processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(stat.parent.name))
    return found


async def _port(file: Path) -> int:
    """Returns the port of the DevTools protocol, which the browser writes into a file when it listens."""
    async with asyncio.timeout(START_S):
        while True:
            with suppress(FileNotFoundError):
                port, whole, _ = file.read_text().partition("\n")  # noqa: ASYNC240  # it is tiny
                if whole:  # the browser may be writing it
                    return int(port)
            await asyncio.sleep(0.02)
