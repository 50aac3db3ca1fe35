"""One rank's child process, as rank 0 sees it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from pdserve.config import RankLaunch
from pdserve.errors import EngineError

RANK_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "pdserve.engine.follower")
"""``-P`` keeps the working directory off the import path, where a folder ``kernels`` would break transformers."""


class RankProcess:
    """A running child. Its standard output and error are this process's. ``kill`` or ``ended`` has to be called."""

    def __init__(self, launch: RankLaunch, command: Sequence[str] = RANK_COMMAND) -> None:
        """Raises EngineError if it cannot be started. The kernel ends it when the calling thread ends."""
        self.rank = launch.rank
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(launch.board, launch.bell))
        except OSError as exc:
            raise EngineError(f"cannot start tensor-parallel rank {self.rank}: {exc}") from exc
        self.pidfd = os.pidfd_open(self._process.pid)
        """Readable once it has ended."""
        assert self._process.stdin is not None
        try:
            # Smaller than a pipe holds: this never blocks.
            self._process.stdin.write(msgspec.msgpack.encode(launch))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; ``end`` will tell how

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self, within_s: float) -> bool:
        """Whether it has ended, or does so in this time."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(int(within_s * 1000)))

    def end(self) -> str:
        """How it ended, in words; only once it has."""
        status = self._process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"tensor-parallel rank {self.rank} (process {self.pid}) {how}"

    def reap(self, grace_s: float) -> None:
        """Kills it unless it ends in this time. Afterwards it has ended."""
        try:
            if not self.ended(grace_s):
                self._process.kill()
            self._process.wait()
        finally:
            os.close(self.pidfd)
