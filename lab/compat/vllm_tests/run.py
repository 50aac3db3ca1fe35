"""Runs vLLM's own tests of its server against a running cluster."""

from __future__ import annotations

from pathlib import Path

from lab.compat.program_runs import Target
from lab.compat.results import ToolResult
from lab.compat.server_tests.run import ServerTests
from lab.compat.vllm_tests.source import TESTS, VERSION, vllm_tests


def run_vllm_tests(target: Target, cache: Path) -> ToolResult:
    """Returns how each of vLLM's tests ended."""
    source = vllm_tests(cache, target.model)
    tests = ServerTests("vllm_tests", "vLLM's tests", VERSION, Path(__file__).parent, source, (TESTS,))
    return tests.run(target, cache)
