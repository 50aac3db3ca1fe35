"""Disaggregated prefill/decode serving of large language models.

``serve`` runs a cluster on this machine for a program in Python; ``pdserve up`` does the same in a shell::

    with pdserve.serve("demo") as cluster:
        client = OpenAI(base_url=cluster.url + "/v1", api_key="none")

The names of ``__all__`` are the ones that stay as they are from version to version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.errors import ClusterFailed as ClusterFailed
    from pdserve.errors import ConfigError as ConfigError
    from pdserve.errors import PdserveError as PdserveError
    from pdserve.serving import Cluster as Cluster
    from pdserve.serving import Node as Node
    from pdserve.serving import serve as serve
    from pdserve.wire.discovery import Role as Role

__all__ = ["Cluster", "ClusterFailed", "ConfigError", "Node", "PdserveError", "Role", "serve"]

_MODULES = {
    "Cluster": "pdserve.serving",
    "ClusterFailed": "pdserve.errors",
    "ConfigError": "pdserve.errors",
    "Node": "pdserve.serving",
    "PdserveError": "pdserve.errors",
    "Role": "pdserve.wire.discovery",
    "serve": "pdserve.serving",
}
"""Where each name is. It is imported when it is first used: each process of pdserve imports this package."""


if not TYPE_CHECKING:  # A checker would take every name for one of these.

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
