"""Runs another project's own tests of its server against a running cluster."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.compat.environments import environment
from lab.compat.outcomes import parse_outcomes
from lab.compat.program_runs import Target
from lab.compat.results import ToolResult
from lab.compat.server_tests.judgement import judge, read_differences, stale

PLUGIN = Path(__file__).parent / "plugin"
"""What the plugins of all projects share."""
DIFFERENCES = "differences.toml"
WORKERS = 4
"""So many tests run at a time: the server computes their answers together, in little more time than one."""
TEST_TIMEOUT_S = 900
RUN_TIMEOUT_S = 7200.0


@dataclass(frozen=True)
class ServerTests:
    """The tests of one project.

    ``folder`` is the package that has their ``plugin`` and their ``differences.toml``. They run with ``source`` as the
    current folder, where they lie in ``tests``.
    """

    name: str
    tool: str
    version: str
    folder: Path
    source: Path
    tests: tuple[str, ...]

    def run(self, target: Target, cache: Path) -> ToolResult:
        """Returns how each test ended that asks a server and that ``differences.toml`` does not leave out."""
        differences = read_differences(self.folder / DIFFERENCES)
        outcomes = cache / f"{self.name}-outcomes.jsonl"
        outcomes.unlink(missing_ok=True)
        python = environment(self.name, cache).python
        argv = [str(python), "-m", "pytest", "-q", "--tb=short", "--timeout", str(TEST_TIMEOUT_S), "-n", str(WORKERS)]
        argv += ["--noconftest", "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "compat_plugin"]
        argv += ["--rootdir", str(self.source), "--outcomes", str(outcomes), "--server-url", target.url]
        argv += ["--server-model", target.model, "--tokenizer", str(target.tokenizer)]
        argv += [f"--ignore-glob={pattern}" for left_out in differences.not_run for pattern in left_out.modules]
        folders = os.pathsep.join(map(str, (self.folder / "plugin", PLUGIN)))
        environ = {**os.environ, "PYTHONPATH": folders, "HF_HUB_OFFLINE": "1"}
        with (cache / f"{self.name}.log").open("wb") as log:
            argv += self.tests
            subprocess.run(argv, cwd=self.source, env=environ, stdout=log, stderr=log, timeout=RUN_TIMEOUT_S)
        found = parse_outcomes(outcomes.read_bytes())
        for test in stale(found, differences):
            print(f"passes although differences.toml names it: {test}")
        what = f"`{'`, `'.join(self.tests)}`, those that ask a server"
        return ToolResult(self.tool, self.version, what, judge(found, differences))
