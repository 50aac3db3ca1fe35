"""The cluster of one chat: ``pdserve up`` as a child process, which ends with the chat."""

from __future__ import annotations

import fcntl
import os
import select
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from pdserve.config import ChatConfig, UpConfig
from pdserve.errors import ClusterFailed
from pdserve.process import pdserve_command
from pdserve.serving import LONGEST_START_S, ClusterChild
from pdserve.settings.setting import settings_of, to_text

END_S = 30.0
"""The cluster has this long to end, and is killed then. It has no requests any more."""
_COMMAND = pdserve_command("up", "--host", "127.0.0.1", "--port", "0", "--ready-json", "on")
_READ_BYTES = 65536
_MOST_NOTICES = 20


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
        self._lines = b""
        self._is_ready = False
        self._reading = threading.Lock()

    def __enter__(self) -> Self:
        """Returns when the cluster is ready; until then, the user sees what it says. Raises ClusterFailed."""
        # A terminal of its own, as large as ours: the cluster shows how its start moves, and later on its lines do not
        # come between those of the chat.
        ours, theirs = os.openpty() if sys.stderr.isatty() else os.pipe()
        if sys.stderr.isatty():
            size = fcntl.ioctl(sys.stderr, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        self._reader = threading.Thread(target=self._read, args=(ours,), name="cluster lines", daemon=True)
        self._reader.start()
        self._child = ClusterChild(_COMMAND, self._environ, LONGEST_START_S, END_S, stderr=theirs)
        try:
            self._child.start()
            self._cluster = self._child.cluster()
            # What it said before it was ready belongs to its start.
            with self._reading:
                while _is_readable(ours, 0):
                    self._take(ours)
                self._is_ready = True
        except BaseException as exc:
            self._child.end()
            os.close(theirs)
            self._reader.join(END_S)
            if isinstance(exc, ClusterFailed):
                raise ClusterFailed("the cluster did not start; the lines above say why") from exc
            raise
        os.close(theirs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the cluster: in order, or at once when the user interrupts that. Afterwards nothing of it is left."""
        if not self._child.ended.done():
            with suppress(OSError):  # the terminal may be gone
                print("the cluster ends", file=sys.stderr, flush=True)
        self._child.end()
        self._reader.join(END_S)

    @property
    def url(self) -> str:
        return self._cluster.url

    def notices(self) -> Sequence[str]:
        """Returns the lines that the cluster has written since it was ready or since the last call."""
        lines, self._lines = self._lines, b""
        found = [line for line in lines.decode(errors="replace").splitlines() if line.strip()]
        return found[-_MOST_NOTICES:]

    def check(self) -> None:
        """Raises ClusterFailed if the cluster has ended."""
        try:
            self._cluster.check()
        except ClusterFailed as exc:
            raise ClusterFailed("\n".join([f"{exc}; its last lines:", *self.notices()])) from exc

    def _read(self, file: int) -> None:
        """Reads what the cluster writes until it has ended."""
        more = True
        while more:
            _is_readable(file)
            with self._reading:
                more = not _is_readable(file, 0) or self._take(file)
        os.close(file)

    def _take(self, file: int) -> bool:
        """Reads from ``file`` once, shows what comes until the cluster is ready, and returns whether more may come."""
        data = b""
        with suppress(OSError):  # which a terminal raises when nobody has its other end
            data = os.read(file, _READ_BYTES)
        if self._is_ready:
            self._lines = (self._lines + data)[-_READ_BYTES:]
        else:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), data)
        return bool(data)


def _is_readable(file: int, within_ms: int | None = None) -> bool:
    """Returns whether something can be read from ``file``, or its end, within this time, by default whenever it is."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(within_ms))
