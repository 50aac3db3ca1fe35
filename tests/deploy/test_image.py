"""Tests what the Dockerfile says, without building it: ``make test-deploy`` builds and runs the image."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from pdserve.cli.main import SUBCOMMANDS
from pdserve.compiled_library import COMPILER, libraries_ahead
from pdserve.models.checkpoint.model_files import INSTALL
from pdserve_kernels.cpu.library import CPU_KERNELS

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, with its continued lines as one."""

    word: str
    rest: str


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def having(self, word: str) -> list[str]:
        return [instruction.rest for instruction in self.instructions if instruction.word == word]

    def sources(self) -> list[str]:
        """Returns what the stage copies out of the repository."""
        copies = [copy.split() for copy in self.having("COPY") if not copy.startswith("--from=")]
        return [source for words in copies for source in words[:-1]]


def instructions() -> list[Instruction]:
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines()]


def global_arguments() -> dict[str, str]:
    found = instructions()
    before = found[: next(at for at, instruction in enumerate(found) if instruction.word == "FROM")]
    assert {instruction.word for instruction in before} == {"ARG"}
    return dict(instruction.rest.split("=", 1) for instruction in before)


def stages() -> list[Stage]:
    stages: list[Stage] = []
    for instruction in instructions():
        if instruction.word == "FROM":
            base, _, name = instruction.rest.partition(" AS ")
            stages.append(Stage(name, base, ()))
        elif stages:
            last = stages.pop()
            stages.append(Stage(last.name, last.base, (*last.instructions, instruction)))
    return stages


def stage(name: str) -> Stage:
    (found,) = [stage for stage in stages() if stage.name == name]
    return found


def is_sent(source: str) -> bool:
    """Returns whether .dockerignore lets ``source`` into the build: the last line that fits decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").rstrip("/")
        if line and not line.startswith("#"):
            above = [source, *(str(parent) for parent in Path(source).parents)]
            if any(fnmatch(path, pattern) for path in above):
                sent = line.startswith("!")
    return sent


def test_what_is_copied_is_there_and_is_sent_to_the_build() -> None:
    sources = [source for stage in stages() for source in stage.sources()]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert is_sent(source), source
    for source in ("tests", "docs", ".git", ".venv", "pdserve/__pycache__", "deploy/base"):
        assert not is_sent(source), source


def test_stages_are_built_on_the_pinned_base_or_on_each_other() -> None:
    arguments = global_arguments()
    assert re.fullmatch(r"docker\.io/library/python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", arguments["BASE"])
    assert arguments["UCX_BASE"] == "${BASE}"
    known = {"${BASE}", "${UCX_BASE}"}
    for one in stages():
        assert one.base in known, one
        known.add(one.name)
        for copy in one.having("COPY"):
            if copy.startswith("--from="):
                assert copy.split()[0].removeprefix("--from=") in known, copy


def test_a_base_without_a_digest_is_refused() -> None:
    (guard,) = [run for run in stage("environment").having("RUN") if run.startswith("case")]
    for base, unpinned, status in (
        (global_arguments()["BASE"], "0", 0),
        ("localhost/base:1", "0", 0),
        ("python:3.11-slim", "0", 1),
        ("python:3.11-slim", "1", 0),
    ):
        environ = {"BASE": base, "UNPINNED_BASE": unpinned}
        ended = subprocess.run(["/bin/sh", "-c", guard], env=environ, capture_output=True, text=True, timeout=60)
        assert ended.returncode == status, ended
        assert bool(ended.stdout) == bool(status)


def test_the_image_has_no_compiler_unless_asked_for() -> None:
    last = stages()[-1]
    assert last.base == "environment"
    assert not any(COMPILER in run for run in stage("environment").having("RUN"))
    (compiler,) = [run for run in last.having("RUN") if COMPILER in run]
    assert compiler.startswith('if [ "$COMPILER" = 1 ]; then')
    assert "COMPILER=0" in last.having("ARG")


def test_the_image_runs_as_nobody_in_particular_and_asks_itself_whether_it_lives() -> None:
    last = stages()[-1]
    assert last.having("USER") == ["10001"]
    assert last.having("ENTRYPOINT") == ['["pdserve"]']
    (health,) = last.having("HEALTHCHECK")
    program, subcommand = json.loads(health.partition(" CMD ")[2])
    assert program == "pdserve"
    assert subcommand in SUBCOMMANDS
    (labels,) = last.having("LABEL")
    assert f'org.opencontainers.image.version="{PROJECT["project"]["version"]}"' in labels


def test_the_image_is_built_from_what_the_project_declares() -> None:
    text = DOCKERFILE.read_text()
    torch = next(need for need in PROJECT["project"]["dependencies"] if need.startswith("torch=="))
    assert f" {torch}\n" in text
    assert INSTALL.removeprefix("pip install ") in text
    assert "gpu" in PROJECT["project"]["optional-dependencies"]
    roots = {"pdserve" if root == "." else root for root in PROJECT["tool"]["setuptools"]["packages"]["find"]["where"]}
    assert roots <= set(stage("application").sources())


def test_a_change_of_pdserves_code_installs_no_dependency_again() -> None:
    assert set(stage("dependencies").sources()) == {"pyproject.toml", "deploy/slim_environment.sh"}
    for name in ("environment", "tools"):
        assert not stage(name).sources()


@pytest.mark.parametrize("extras", [[], ["gpu"]])
def test_the_dependencies_are_read_from_the_project(extras: list[str], tmp_path: Path) -> None:
    (install,) = [run for run in stage("dependencies").having("RUN") if run.startswith("python -c")]
    program = shlex.split(install.partition(" $EXTRAS")[0])[2]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    listed = subprocess.run(
        [sys.executable, "-c", program, *extras], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    optional = [need for name in extras for need in PROJECT["project"]["optional-dependencies"][name]]
    assert listed.stdout.splitlines() == [*PROJECT["project"]["dependencies"], *optional]


def test_the_kernels_are_compiled_from_their_own_files_alone(tmp_path: Path) -> None:
    """The stage has a part of the packages. What it compiles has to be what the whole of them looks for."""
    for copy in stage("kernels").having("COPY"):
        *sources, target = copy.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target)
            else:
                (tmp_path / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target)
    (run,) = stage("kernels").having("RUN")
    program = shlex.split(run)[2]
    said = program.replace("build_ahead", "libraries_ahead").replace(
        "libraries_ahead(CPU_KERNELS)", "print(*(path.name for path in libraries_ahead(CPU_KERNELS)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", said], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == [path.name for path in libraries_ahead(CPU_KERNELS)]


@pytest.mark.deploy
def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, "")
