"""A node as a fork, as ``process_forks`` has it: ``python -m tests.cluster.forked_node SOCKET ROLE FLAGS``.

Its engine is such a fork, too. With ``engine`` in place of a role, it is that engine, whose other ranks are forks.
"""

from __future__ import annotations

import sys
from functools import partial

from pdserve.api.node import server
from pdserve.cli.main import main as pdserve
from tests.cluster.process_forks import NODE
from tests.forks import Forks


def main(socket: str, *argv: str) -> int:
    if argv == ("engine",):
        from pdserve.engine.process import main as serve_engine

        have_ranks_forked(socket)
        return serve_engine()
    server.serve = partial(server.serve, engine_command=Forks(socket).command(NODE, socket, "engine"))
    return pdserve(argv)


def have_ranks_forked(socket: str) -> None:
    """Has the engine of this process start its other ranks as forks."""
    from pdserve.engine.tp import tp_ranks

    command = Forks(socket).command("pdserve.engine.tp.rank_program")
    tp_ranks.Ranks = partial(tp_ranks.Ranks, command=command)  # type: ignore[assignment,misc]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
