"""Which code posts UCX's messages."""

from __future__ import annotations

import logging
from pathlib import Path

from pdserve.compiled_library import BuildError
from pdserve.config import UcxCalls
from pdserve.errors import ConfigError
from pdserve_kvtransfer.compiled_mover import MoverLibrary
from pdserve_kvtransfer.mover import MakeMover
from pdserve_kvtransfer.ucxx_mover import UcxxMover

log = logging.getLogger(__name__)


def chosen_mover(choice: UcxCalls, cache_dir: Path, *, digests: bool = False) -> MakeMover:
    """Compiled now, in about a second, if it is to be and is not below ``cache_dir`` yet.

    ``digests`` is whether to make those of landed blocks at once, while they are in a cache, if that can be done.

    Raises ConfigError if compiled code was asked for by name and cannot be had; if it is only the better choice, the
    log says so.
    """
    if choice is UcxCalls.PYTHON:
        return UcxxMover
    try:
        return MoverLibrary(cache_dir, digests).mover
    except BuildError as exc:
        if choice is UcxCalls.COMPILED:
            raise ConfigError(f"--ucx-calls compiled: {exc}") from exc
        log.warning("KV blocks are posted from Python instead of compiled code, which costs less CPU time: %s", exc)
        return UcxxMover
