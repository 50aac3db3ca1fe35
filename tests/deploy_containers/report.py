"""What a run of ``make test-deploy`` found: a verdict and figures of each scenario."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec


class Figure(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str = ""
    of: str = ""
    """The pod or role that it is about, if there are several."""

    def __str__(self) -> str:
        number = f"{self.value:.0f}" if self.value == int(self.value) else f"{self.value:.1f}"
        return f"{number} {self.unit}".strip()


class Verdict(msgspec.Struct, frozen=True):
    """What one scenario showed."""

    scenario: str
    shows: str
    """What has to hold, in a sentence or two."""
    seconds: float
    figures: list[Figure]
    problems: list[str]

    @property
    def passed(self) -> bool:
        return not self.problems


class Report(msgspec.Struct, frozen=True):
    measured: str
    cores: int
    cpu: str
    image: str
    image_bytes: int
    changes: list[str]
    """How the manifests were changed to fit the machine."""
    verdicts: list[Verdict]

    @property
    def passed(self) -> bool:
        return bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)


@dataclass
class Findings:
    """What a scenario finds while it runs."""

    figures: list[Figure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def figure(self, name: str, value: float, unit: str = "", of: str = "") -> None:
        self.figures.append(Figure(name, round(value, 2), unit, of))

    def check(self, good: bool, problem: str) -> None:
        """Notes a problem, and lets the scenario go on."""
        if not good:
            self.problems.append(problem)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Makes a failed assertion of the block a problem."""
        try:
            yield
        except AssertionError as exc:
            self.problems.append(str(exc))


def write_report(report: Report, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def read_report(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)


def markdown(report: Report) -> str:
    """Returns the report as a part of a page."""
    passed = sum(verdict.passed for verdict in report.verdicts)
    seconds = sum(verdict.seconds for verdict in report.verdicts)
    head = (
        f"`make test-deploy` on {report.cores} cores ({report.cpu}), {report.measured} UTC: {passed} of "
        f"{len(report.verdicts)} scenarios passed, in {seconds / 60:.0f} minutes after the image was built. The image "
        f"has {report.image_bytes / 1e9:.2f} GB. Changed to fit the machine: {', '.join(report.changes)}."
    )
    return "\n\n".join([head, *(_scenario(verdict) for verdict in report.verdicts)])


def _scenario(verdict: Verdict) -> str:
    word = "passed" if verdict.passed else "**failed**"
    parts = [f"**{verdict.scenario.capitalize()}**: {word}, {verdict.seconds:.0f} s. {verdict.shows}"]
    parts += ["\n".join(f"* {problem}" for problem in verdict.problems)] if verdict.problems else []
    if alone := [f"{figure.name}: {figure}" for figure in verdict.figures if not figure.of]:
        parts.append(f"{'; '.join(alone)}.")
    if rows := dict.fromkeys(figure.of for figure in verdict.figures if figure.of):
        names = list(dict.fromkeys(figure.name for figure in verdict.figures if figure.of))
        cells = {(figure.of, figure.name): str(figure) for figure in verdict.figures}
        lines = [["", *names], ["---"] * (len(names) + 1)]
        lines += [[row, *(cells.get((row, name), "") for name in names)] for row in rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)
