"""What ``process_forks`` loads for engines: torch as an engine has it, and then an engine's modules."""

from __future__ import annotations

from importlib import import_module

from pdserve.models.lean_torch import import_torch

import_torch()
for _name in ("process", "assembly", "runner_loading", "tp.rank_program"):
    import_module(f"pdserve.engine.{_name}")
