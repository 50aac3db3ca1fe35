"""Checks which software is installed, and whether UCX can be loaded."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from pdserve.doctor.finding import Finding, ok, problem
from pdserve.errors import TransferError
from pdserve_kvtransfer.ucx.ucx_library import PREFER_SYSTEM, LoadedUcx, loaded_ucx

_PACKAGES = ("pdserve", "torch", "transformers", "pyzmq", "ucxx-cu13", "libucx-cu13")


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    python: str
    kernel: str
    packages: Mapping[str, str]
    """The version of each package; empty if the package is not installed."""
    ucx: LoadedUcx | None
    """The UCX library that ucxx has loaded."""
    ucx_error: str
    """Why UCX cannot be loaded; empty if it can be."""
    variables: Mapping[str, str]
    """The variables of the environment that choose and direct UCX. Nodes that are started from it obey them, too."""


def read_software(environ: Mapping[str, str]) -> SoftwareFacts:
    ucx, error = _load_ucx()
    return SoftwareFacts(
        python=platform.python_version(),
        kernel=platform.release(),
        packages=dict(map(_installed, _PACKAGES)),
        ucx=ucx,
        ucx_error=error,
        variables={
            name: value for name, value in sorted(environ.items()) if name.startswith("UCX_") or name == PREFER_SYSTEM
        },
    )


def _installed(package: str) -> tuple[str, str]:
    """Returns a package and its version. The one for CUDA 12 will do where the one for CUDA 13 is not."""
    names = (package, package.replace("cu13", "cu12"))
    return next(((name, found) for name in names if (found := _version(name))), (package, ""))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _load_ucx() -> tuple[LoadedUcx | None, str]:
    """Returns the library, or None and the error."""
    try:
        return loaded_ucx(), ""
    except TransferError as exc:
        return None, str(exc)


def check_software(facts: SoftwareFacts) -> list[Finding]:
    return [_packages(facts), _ucx(facts), _variables(facts)]


def _packages(facts: SoftwareFacts) -> Finding:
    missing = [name for name, found in facts.packages.items() if not found]
    versions = ", ".join(f"{name} {found}" for name, found in facts.packages.items() if found)
    seen = f"{versions}, Python {facts.python}, Linux {facts.kernel}"
    if missing:
        return problem("software", f"{seen}; missing: {', '.join(missing)}", "pip install pdserve brings all of them")
    return ok("software", seen)


def _ucx(facts: SoftwareFacts) -> Finding:
    if facts.ucx_error:
        names = " ".join(name for name in facts.packages if "ucx" in name)
        return problem(
            "UCX library",
            facts.ucx_error,
            f"without {PREFER_SYSTEM}, the package is taken: pip install --force-reinstall {names}; "
            "without UCX no KV block moves",
        )
    return ok("UCX library", str(facts.ucx))


def _variables(facts: SoftwareFacts) -> Finding:
    if not facts.variables:
        return ok("UCX variables", "none in this environment")
    return ok("UCX variables", " ".join(f"{name}={value}" for name, value in facts.variables.items()))
