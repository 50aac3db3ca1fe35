"""Shows that other projects' clients, tools and tests work with a cluster: ``make compat``.

Everything that it downloads goes into one cache folder, in environments of its own. It starts a P/D cluster with the
demo model, runs each tool against it, prints the checks that failed, and ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pdserve
from lab.compat.environments import InstallError
from lab.compat.lm_eval_reference import write_reference
from lab.compat.program_runs import PROGRAMS_IN_PYTHON, Program, Target, run_ai_sdk
from lab.compat.results import Check, Outcome, ToolResult, details, table
from lab.compat.sglang_tests.run import run_sglang_tests
from lab.compat.vllm_tests.run import run_vllm_tests
from pdserve.models.checkpoint.model_files import DEMO_NAME
from pdserve.settings import cache_folder
from tests.demo_folder import demo_folder
from tests.processes import clean_environ

CHECKOUT = Path(__file__).parents[2]
CLUSTER: dict[str, Any] = {"dtype": "fp32", "kv_cache_mib": 2048, "max_model_len": 3072, "store": True}
"""Others' tests have prompts of up to 3,000 tokens, and answers that go on until the context ends."""


@contextmanager
def demo_cluster(model: Path) -> Iterator[str]:
    """Serves the demo model, of which ``model`` is the folder, and yields its URL without ``/v1``."""
    environ = clean_environ()
    with pdserve.serve(model, environ=environ, served_model_name=DEMO_NAME, cors_origins="*", **CLUSTER) as cluster:
        yield cluster.url


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.compat", description=__doc__)
    parser.add_argument("--cache", type=Path, default=CHECKOUT / ".compat", help="downloads and environments lie here")
    parser.add_argument("--table", type=Path, help="the table of results is also written to this file")
    parser.add_argument(
        "--url", help="a running cluster of the demo model, without /v1; one is started if it is missing"
    )
    parser.add_argument(
        "--checkout", type=Path, help="a checkout of SGLang's repository, without which sglang_tests are not run"
    )
    parser.add_argument("tools", nargs="*", help="only these tools are run")
    options = parser.parse_args()
    cache: Path = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    tools: dict[str, Callable[[Target], ToolResult]] = {
        program.module: partial(_run_program, program, cache) for program in PROGRAMS_IN_PYTHON
    }
    tools["ai_sdk"] = lambda target: run_ai_sdk(target, cache)
    tools["vllm_tests"] = lambda target: run_vllm_tests(target, cache)
    if options.checkout is not None:
        tools["sglang_tests"] = lambda target: run_sglang_tests(target, cache, options.checkout)
    if unknown := set(options.tools) - set(tools):
        parser.error(f"no such tools: {', '.join(sorted(unknown))}; there are {', '.join(tools)}")
    model = demo_folder(cache_folder(os.environ))
    chosen = {name: run for name, run in tools.items() if not options.tools or name in options.tools}
    if "lm_eval_tasks" in chosen:
        write_reference(model, cache / "lm_eval_reference.json")
    with demo_cluster(model) if options.url is None else nullcontext(options.url) as url:
        target = Target(url, DEMO_NAME, model)
        results = [_run(name, run, target) for name, run in chosen.items()]
    print(details(results))
    print(table(results))
    if options.table is not None:
        options.table.write_text(table(results))
    return 1 if any(result.of(Outcome.FAILED) for result in results) else 0


def _run_program(program: Program, cache: Path, target: Target) -> ToolResult:
    return program.run(target, cache)


def _run(name: str, run: Callable[[Target], ToolResult], target: Target) -> ToolResult:
    print(f"{name} …", file=sys.stderr, flush=True)
    try:
        return run(target)
    except InstallError as error:
        return ToolResult(name, "", "", (Check("installation", Outcome.FAILED, str(error)),))


if __name__ == "__main__":
    sys.exit(main())
