"""Runs vLLM's own tests of its server against a running cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.compat.environments import environment
from tests.compat.outcomes import parse_outcomes
from tests.compat.program_runs import Target
from tests.compat.results import ToolResult
from tests.compat.vllm_tests.judgement import judge, read_differences, stale
from tests.compat.vllm_tests.source import TESTS, VERSION, vllm_tests

PLUGIN = Path(__file__).parent / "plugin"
TEST_TIMEOUT_S = 120
RUN_TIMEOUT_S = 3600.0


def run_vllm_tests(target: Target, cache: Path) -> ToolResult:
    """Returns how each test ended that asks a server and that ``differences.toml`` does not leave out."""
    differences = read_differences()
    folder = vllm_tests(cache, target.model)
    outcomes = cache / "vllm-outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    python = environment("vllm_tests", cache).python
    argv = [str(python), "-m", "pytest", "-q", "--tb=short", "--timeout", str(TEST_TIMEOUT_S)]
    argv += ["--noconftest", "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "compat_plugin"]
    argv += ["--rootdir", str(folder), "--server-url", target.url, "--tokenizer", str(target.tokenizer)]
    argv += [f"--ignore-glob={pattern}" for left_out in differences.not_run for pattern in left_out.modules]
    environ = {**os.environ, "PYTHONPATH": str(PLUGIN), "HF_HUB_OFFLINE": "1"}
    with (cache / "vllm-tests.log").open("wb") as log:
        argv += ["--outcomes", str(outcomes), TESTS]
        subprocess.run(argv, cwd=folder, env=environ, stdout=log, stderr=log, timeout=RUN_TIMEOUT_S)
    found = parse_outcomes(outcomes.read_bytes())
    for test in stale(found, differences):
        print(f"passes although differences.toml names it: {test}")
    return ToolResult("vLLM's tests", VERSION, f"`{TESTS}`, those that ask a server", judge(found, differences))
