"""As many open files as a benchmark's connections take."""

from __future__ import annotations

import resource

from pdserve.errors import BenchError

_SPARE = 200


def allow_open_files(connections: int) -> None:
    """For this process and those that it starts. Raises BenchError if the system does not allow enough."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _SPARE
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchError(f"{connections} connections of one process take {needed} open files; the system allows {hard}")
    soft = needed if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
