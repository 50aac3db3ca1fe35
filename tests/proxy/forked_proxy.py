"""``pdserve proxy`` whose workers are forks: ``python -m tests.proxy.forked_proxy SOCKET FLAGS``."""

from __future__ import annotations

import sys
from functools import partial

from pdserve.cli.main import main as pdserve
from pdserve_proxy import server
from pdserve_proxy.workers.supervisor import supervise
from tests.forks import Forks


def main(socket: str, *flags: str) -> int:
    command = Forks(socket).command("pdserve_proxy.workers.worker")
    server.supervise = partial(supervise, command=command)  # type: ignore[attr-defined]
    return pdserve(("proxy", *flags))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
