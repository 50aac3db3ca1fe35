"""Environments of Python and Node for other projects' programs, each with pinned versions, below one cache folder."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_TIMEOUT_S = 1800.0


class InstallError(Exception):
    """An environment could not be made: no network, for example."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the packages of one requirements file."""

    python: Path
    requirements: Path

    def version(self, package: str) -> str:
        """Returns the pinned version of ``package``."""
        for line in self.requirements.read_text().splitlines():
            name, _, version = line.partition("==")
            if name.partition("[")[0] == package:
                return version
        raise ValueError(f"{self.requirements} has no line for {package}")


def environment(name: str, cache: Path) -> Environment:
    """Returns the environment of ``requirements/NAME.txt``, which is made where it is missing or of older pins."""
    requirements = REQUIREMENTS / f"{name}.txt"
    folder = cache / "environments" / name
    stamp = folder / "installed"
    made = Environment(folder / "bin" / "python", requirements)
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(made.python), "-m", "pip", "install", "--quiet", "--no-compile", "--requirement", str(requirements)])
        stamp.write_text(wanted)
    return made


def node_version(package: Path, name: str) -> str:
    """Returns the pinned version of a package in a ``package.json``."""
    version: str = json.loads(package.read_bytes())["dependencies"][name]
    return version


def node_modules(package: Path, cache: Path) -> Path:
    """Returns a folder with the packages of a ``package.json`` installed, which npm makes where it is missing."""
    folder = cache / "environments" / "node"
    stamp = folder / "installed"
    wanted = hashlib.sha256(package.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_bytes(package.read_bytes())
        _run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)])
        stamp.write_text(wanted)
    return folder


def _run(argv: list[str]) -> None:
    try:
        subprocess.run(argv, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True, text=True)
    except FileNotFoundError as exc:
        raise InstallError(f"{argv[0]} is not installed") from exc
    except subprocess.CalledProcessError as exc:
        raise InstallError(f"{' '.join(argv)}: {exc.stderr[-2000:]}") from exc
    except subprocess.TimeoutExpired as exc:
        raise InstallError(f"{' '.join(argv)} took over {INSTALL_TIMEOUT_S} s") from exc
