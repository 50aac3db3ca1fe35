"""UCX's own programs, ``ucx_info`` and ``ucx_perftest``, as its wheel ships them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pdserve.doctor.finding import Finding, ok, warning

_WHEEL = "libucx"
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class UcxTools:
    """Where they are, and the libraries that they need."""

    info: Path
    perftest: Path
    library: Path

    def environ(self, environ: Mapping[str, str], tls: str) -> dict[str, str]:
        """For running them with the transports ``tls``, as ``UCX_TLS`` takes it; as ``environ`` says if empty."""
        chosen = {"UCX_TLS": tls} if tls else {}
        return {**environ, "LD_LIBRARY_PATH": str(self.library), "UCX_LOG_LEVEL": "error", **chosen}

    def ask(self, environ: Mapping[str, str], tls: str, *flags: str) -> str:
        """What ``ucx_info`` prints; empty if it fails."""
        try:
            done = subprocess.run(
                [self.info, *flags],
                env=self.environ(environ, tls),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""


def read_tools() -> UcxTools | None:
    """None if the wheel does not ship them."""
    spec = find_spec(_WHEEL)
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place)
        tools = UcxTools(folder / "bin" / "ucx_info", folder / "bin" / "ucx_perftest", folder / "lib")
        if tools.info.is_file() and tools.perftest.is_file():
            return tools
    return None


def check_tools(tools: UcxTools | None) -> Finding:
    if tools is None:
        return warning(
            "UCX tools",
            "ucx_info and ucx_perftest were not found",
            "pip install libucx-cu12 ships them; without them there are no device list and no yardstick",
        )
    return ok("UCX tools", f"ucx_info and ucx_perftest in {tools.info.parent}")
