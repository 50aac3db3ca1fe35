"""SGLang's tests, out of a checkout of its repository: its source distribution has none.

Nothing of them is in this repository. Those that are run are copied to the cache, with our model in place of theirs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from lab.compat.environments import InstallError

TESTS = ("test/registered/openai_server", "test/manual/openai_server")
KITS = "python/sglang/test/kits"
"""Tests that several modules share."""
GIT_TIMEOUT_S = 30.0

OTHER_MODELS = re.compile(r'"(?:meta-llama|mistralai|Qwen)/[\w.-]+"')
"""The names of models in the tests. SGLang takes any name. Here, the tests have to ask for the model that is served."""


def sglang_tests(checkout: Path, cache: Path, model: str) -> Path:
    """Returns a folder with the tests of a checkout, which ask for ``model``. Raises InstallError if it has none."""
    adapted = cache / "sglang-adapted"
    shutil.rmtree(adapted, ignore_errors=True)
    for folder in (*TESTS, KITS):
        if not (checkout / folder).is_dir():
            raise InstallError(f"{checkout} is no checkout of SGLang: it has no folder {folder}")
        shutil.copytree(checkout / folder, adapted / folder)
    for path in adapted.rglob("*.py"):
        path.write_text(OTHER_MODELS.sub(f'"{model}"', path.read_text()))
    return adapted


def commit(checkout: Path) -> str:
    """Returns the commit of a checkout, in short; without git, only that it is a checkout."""
    try:
        argv = ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"]
        found = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return "a checkout"
    return found.stdout.strip()
