"""vLLM's tests, out of its source distribution: downloaded to the cache, with our model in place of theirs.

Nothing of them is in this repository. pip fetches and checks the distribution, and unpacks it to ask for its metadata.
That fails, as it needs torch, but with ``--no-clean`` pip leaves what it has unpacked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.compat.environments import InstallError

VERSION = "0.32.0"
DOWNLOAD_TIMEOUT_S = 600.0
TESTS = "tests/entrypoints"

OTHER_MODELS = re.compile(
    r'"(?:(?:Qwen|HuggingFaceH4|HuggingFaceTB|facebook|ibm-granite|openai-community)/[\w.-]+|claude-3-7-sonnet-latest)"'
)
"""The names of models in the tests. A server has only one model, so the tests have to ask for that one."""


def vllm_tests(cache: Path, model: str) -> Path:
    """Returns the folder in which ``tests/entrypoints`` lies. Its tests ask for ``model``."""
    source = cache / f"vllm-{VERSION}"
    if not source.is_dir():
        _download(source)
    adapted = cache / f"vllm-{VERSION}-adapted"
    shutil.rmtree(adapted, ignore_errors=True)
    shutil.copytree(source / TESTS, adapted / TESTS)
    (adapted / "tests" / "__init__.py").touch()
    for path in (adapted / TESTS).rglob("*.py"):
        path.write_text(OTHER_MODELS.sub(f'"{model}"', path.read_text()))
    return adapted


def _download(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=vllm", "--no-build-isolation"]
        subprocess.run(
            [*argv, "--no-clean", f"vllm=={VERSION}", "--dest", folder],
            env={**os.environ, "TMPDIR": folder},
            timeout=DOWNLOAD_TIMEOUT_S,
            capture_output=True,
        )
        found = list(Path(folder).glob(f"pip-*/vllm_*/{TESTS}"))
        if not found:
            raise InstallError(f"pip could not download the source distribution of vLLM {VERSION}")
        shutil.move(found[0].parents[1], target)
