"""What the programs of this folder have in common: a program is a list of checks, each a function of the server.

A program runs in the environment of its own tool, without pdserve: ``python -m lab.compat.programs.NAME --url URL
--model NAME``. It prints one line of JSON for each check, which ``lab/compat/program_runs.py`` reads.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

LONGEST_REASON = 1000
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "Paris"


@dataclass(frozen=True)
class Server:
    """The server, the name of its model, the folder of its tokeniser, and a folder for what a tool reads or writes."""

    url: str
    model: str
    tokenizer: Path
    cache: Path

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


Check = Callable[[Server], Coroutine[object, object, None] | None]


def run_checks(checks: Sequence[Check]) -> None:
    """Runs the checks on the server of the command line, and prints how each ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--cache", required=True, type=Path)
    options = parser.parse_args()
    server = Server(options.url, options.model, options.tokenizer, options.cache)
    for check in checks:
        reason = _failure(check, server)
        outcome = "passed" if reason is None else "failed"
        print(json.dumps({"test": check.__name__, "outcome": outcome, "message": reason or ""}), flush=True)


def _failure(check: Check, server: Server) -> str | None:
    try:
        ending = check(server)
        if inspect.iscoroutine(ending):
            asyncio.run(ending)
    except Exception as error:  # Whatever a tool raises is the finding.
        where = traceback.extract_tb(error.__traceback__)[1:2]
        line = f" (line {where[0].lineno})" if where else ""
        return f"{type(error).__name__}{line}: {error}"[:LONGEST_REASON]
    return None
