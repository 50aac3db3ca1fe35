"""Runs SGLang's own tests of its server against a running cluster."""

from __future__ import annotations

from pathlib import Path

from lab.compat.program_runs import Target
from lab.compat.results import ToolResult
from lab.compat.server_tests.run import ServerTests
from lab.compat.sglang_tests.source import TESTS, commit, sglang_tests


def run_sglang_tests(target: Target, cache: Path, checkout: Path) -> ToolResult:
    """Returns how each of the tests in a checkout of SGLang ended."""
    source = sglang_tests(checkout, cache, target.model)
    tests = ServerTests("sglang_tests", "SGLang's tests", commit(checkout), Path(__file__).parent, source, TESTS)
    return tests.run(target, cache)
