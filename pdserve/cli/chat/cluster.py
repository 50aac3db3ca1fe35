"""The cluster of one chat: ``pdserve up`` as a child process, which ends with the chat."""

from __future__ import annotations

import fcntl
import os
import re
import select
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from pdserve.config import ChatConfig, UpConfig
from pdserve.errors import PdserveError
from pdserve.process import ChildProcess, pdserve_command
from pdserve.settings.setting import settings_of, to_text

END_S = 30.0
"""The cluster has this long to end, and is killed then. It has no requests any more."""
_READY = re.compile(rb'^(?:OpenAI-compatible API: |{"url":")(?P<url>https?://[^\s"/]+)(?=[\s"/])', re.MULTILINE)
"""The line in which 'pdserve up' says where clients connect, for people or for programs."""
_READ_BYTES = 65536
_MOST_NOTICES = 20


class ClusterEnded(PdserveError):
    """The cluster did not start, or has ended before the chat."""


def cluster_environ(config: ChatConfig, environ: Mapping[str, str], file: str) -> dict[str, str]:
    """Returns the environment of the cluster: ``environ`` and ``file`` with the settings of ``config`` in them."""
    found = dict(environ)
    of_up = {setting.flag for setting in settings_of(UpConfig)}
    for setting in settings_of(ChatConfig):
        if setting.flag in of_up:
            value = getattr(getattr(config, setting.section), setting.field)
            found.pop(setting.env, None)
            # With a file, a default may stand against what the file says.
            if value != setting.default or (file and value != ""):
                found[setting.env] = to_text(value)
    found["PDSERVE_ASK"] = ""
    if config.talk.api_key_file:
        found["PDSERVE_API_KEY_FILE"] = config.talk.api_key_file
    if file:
        found["PDSERVE_CONFIG"] = file
    return found


class OwnCluster:
    """The cluster of one chat, within a ``with`` block."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._ready = threading.Event()
        self._found = b""
        self._url = ""
        self._errors = b""

    def __enter__(self) -> Self:
        """Returns when the cluster is ready; until then, the user sees what it says. Raises ClusterEnded."""
        ours, theirs = os.openpty() if sys.stderr.isatty() else os.pipe()
        try:
            if sys.stderr.isatty():
                # A terminal of its own, as large as ours: the cluster shows how its start moves, and later on its
                # lines do not come between those of the chat.
                size = fcntl.ioctl(sys.stderr, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
            answers, answering = os.pipe()
            try:
                command = pdserve_command("up", "--host", "127.0.0.1", "--port", "0")
                self._process = ChildProcess(
                    "the cluster", command, environ=self._environ, stdout=answering, stderr=theirs, own_session=True
                )
            except BaseException:
                os.close(answers)
                raise
            finally:
                os.close(answering)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours, answers), name="cluster lines", daemon=True)
        self._reader.start()
        try:
            self._ready.wait()
            if not self._url:
                self._process.ended(END_S)
                raise ClusterEnded("the cluster did not start; the lines above say why")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def url(self) -> str:
        return self._url

    def notices(self) -> Sequence[str]:
        """Returns the lines that the cluster has written since it was ready or since the last call."""
        lines, self._errors = self._errors, b""
        found = [line for line in lines.decode(errors="replace").splitlines() if line.strip()]
        return found[-_MOST_NOTICES:]

    def check(self) -> None:
        """Raises ClusterEnded if the cluster has ended."""
        if self._process.ended():
            raise ClusterEnded("\n".join([f"{self._process.describe_end()}; its last lines:", *self.notices()]))

    def _end(self) -> None:
        """Ends the cluster: in order, or at once when the user interrupts that. Afterwards nothing of it is left."""
        self._process.terminate()
        try:
            if self._url and not self._process.ended():
                with suppress(OSError):  # the terminal may be gone
                    print("the cluster ends", file=sys.stderr, flush=True)
            self._process.ended(END_S)
        finally:
            self._process.reap(0.0)
            self._reader.join(END_S)

    def _read(self, errors: int, answers: int) -> None:
        """Reads what the cluster writes until it has ended, and shows what comes on ``errors`` until it is ready."""
        poller = select.poll()
        poller.register(errors, select.POLLIN)
        poller.register(answers, select.POLLIN)
        open_files = {errors, answers}
        try:
            while open_files:
                ready = {file for file, _ in poller.poll()}
                # What it said before it was ready belongs to its start.
                for file in (errors, answers):
                    if file in ready and not self._take(file, is_error=file == errors):
                        poller.unregister(file)
                        open_files.discard(file)
        finally:
            os.close(errors)
            os.close(answers)
            self._ready.set()

    def _take(self, file: int, *, is_error: bool) -> bool:
        """Reads from ``file`` once, and returns whether there is more to come."""
        data = b""
        with suppress(OSError):  # which a terminal raises when nobody has its other end
            data = os.read(file, _READ_BYTES)
        if not is_error:
            self._note_url(data)
        elif self._ready.is_set():
            self._errors = (self._errors + data)[-_READ_BYTES:]
        else:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), data)
        return bool(data)

    def _note_url(self, data: bytes) -> None:
        if self._ready.is_set():
            return
        self._found = (self._found + data)[-_READ_BYTES:]
        if found := _READY.search(self._found):
            self._url = found["url"].decode()
            self._ready.set()
