"""What ``tests.cluster.forked_node`` loads for engines: torch as an engine has it, and then an engine's modules."""

from __future__ import annotations

from importlib import import_module

from pdserve.models.lean_torch import import_torch

import_torch()
for _name in ("pdserve.engine.process", "pdserve.engine.assembly", "pdserve.engine.runner_loading"):
    import_module(_name)
