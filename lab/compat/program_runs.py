"""Runs the programs of ``lab/compat/programs``, each in the environment of its own tool."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.compat.environments import environment, node_modules, node_version
from lab.compat.outcomes import parse_outcomes
from lab.compat.results import Check, Outcome, ToolResult

CHECKOUT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PROGRAM_TIMEOUT_S = 900.0
LONGEST_REASON = 1000


@dataclass(frozen=True)
class Target:
    """The server that is asked, the name of its model, and the folder that its tokeniser is in."""

    url: str
    model: str
    tokenizer: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return "--url", self.url, "--model", self.model, "--tokenizer", str(self.tokenizer)


@dataclass(frozen=True)
class Program:
    """One program: its module, the package whose version the table names, and what it does, in a few words."""

    module: str
    tool: str
    package: str
    what: str

    def run(self, target: Target, cache: Path) -> ToolResult:
        made = environment(self.module, cache)
        argv = [str(made.python), "-m", f"lab.compat.programs.{self.module}", *target.flags, "--cache", str(cache)]
        checks = run_program(argv, cache / f"{self.module}.log", CHECKOUT)
        return ToolResult(self.tool, made.version(self.package), self.what, checks)


PROGRAMS_IN_PYTHON = (
    Program("openai_sdk", "OpenAI's SDK", "openai", "chat, streams, `parse`, tool helpers, responses"),
    Program("langchain", "LangChain", "langchain-openai", "streams, `bind_tools`, `with_structured_output`"),
    Program("litellm_sdk", "LiteLLM", "litellm", "`completion` streamed and not, tools, JSON Schema, context error"),
    Program(
        "llama_index_sdk", "LlamaIndex", "llama-index-llms-openai-like", "complete, chat, stream, tools, structured"
    ),
    Program("instructor_sdk", "instructor", "instructor", "tools, strict tools, JSON Schema, partial answers"),
    Program("pydantic_ai_sdk", "pydantic-ai", "pydantic-ai-slim", "text, stream, outputs by tool and by JSON Schema"),
    Program("anthropic_sdk", "Anthropic's SDK", "anthropic", "messages, streams, tools, `count_tokens`"),
    Program(
        "lm_eval_tasks", "lm-eval", "lm-eval", "a multiple-choice and a generating task: the scores of transformers"
    ),
    Program("aiperf_load", "aiperf", "aiperf", "`profile`, streamed chats"),
    Program("guidellm_load", "guidellm", "guidellm", "`run`, streamed text completions"),
    Program("schema_tests", "Schemathesis", "schemathesis", "`/openapi.json`, valid and invalid requests"),
)


def run_ai_sdk(target: Target, cache: Path) -> ToolResult:
    """Runs the program for Vercel's AI SDK, which is written in JavaScript."""
    package = PROGRAMS / "ai_sdk" / "package.json"
    modules = node_modules(package, cache)
    program = modules / "ai_sdk.mjs"
    program.write_bytes((PROGRAMS / "ai_sdk" / "ai_sdk.mjs").read_bytes())
    checks = run_program(["node", str(program), target.url, target.model], cache / "ai_sdk.log", modules)
    version = node_version(package, "ai")
    return ToolResult("Vercel's AI SDK", version, "`generateText`, `streamText`, tools, objects", checks)


def run_program(argv: Sequence[str], log: Path, folder: Path) -> tuple[Check, ...]:
    """Returns the checks that a program prints, as lines of JSON. Whatever else it says is in ``log``."""
    with log.open("wb") as errors:
        try:
            done = subprocess.run(argv, cwd=folder, stdout=subprocess.PIPE, stderr=errors, timeout=PROGRAM_TIMEOUT_S)
        except subprocess.TimeoutExpired as late:
            return (*_checks(late.stdout or b""), Check("end", Outcome.FAILED, f"not within {PROGRAM_TIMEOUT_S} s"))
    if done.returncode != 0:
        return (*_checks(done.stdout), Check("end", Outcome.FAILED, f"exit status {done.returncode}; see {log}"))
    return _checks(done.stdout)


def _checks(output: bytes) -> tuple[Check, ...]:
    lines = b"\n".join(line for line in output.splitlines() if line.startswith(b'{"test"'))
    return tuple(
        Check(found.test, found.outcome, found.message[:LONGEST_REASON].replace("\n", " "))
        for found in parse_outcomes(lines)
    )
