"""Runs vLLM's own tests of its server against a running cluster."""

from __future__ import annotations

from pathlib import Path

from tests.compat.program_runs import Target
from tests.compat.results import ToolResult
from tests.compat.server_tests.run import ServerTests
from tests.compat.vllm_tests.source import TESTS, VERSION, vllm_tests


def run_vllm_tests(target: Target, cache: Path) -> ToolResult:
    """Returns how each of vLLM's tests ended."""
    source = vllm_tests(cache, target.model)
    tests = ServerTests("vllm_tests", "vLLM's tests", VERSION, Path(__file__).parent, source, (TESTS,))
    return tests.run(target, cache)
