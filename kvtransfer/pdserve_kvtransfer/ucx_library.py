"""Loading UCX, by way of ucxx, which brings or finds it."""

from __future__ import annotations

import os
from typing import Any


def load_ucxx() -> Any:
    """ucxx's module of UCX objects. Raises ImportError or OSError if there is none."""
    # ucxx sets variables that this UCX has no use for, and UCX would complain about them on stderr: hence the first,
    # and hence the import here, after it. The others keep a peer's death off stderr: it is in our own log.
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCXX_LOG_LEVEL", "fatal")
    from ucxx._lib import libucxx

    return libucxx
