"""What a run of ``make test-deploy`` found: a verdict and figures of each scenario."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Returns the whole report as Markdown."""
    return "\n\n".join([_head(report), *(_scenario(verdict) for verdict in report.verdicts)])


def summary(report: Report) -> str:
    """Returns the report as a part of a page: a line for each scenario, with the least and the most of each figure."""
    lines = ["| scenario | verdict | figures, least to most |", "|---|---|---|"]
    lines += [
        f"| {verdict.scenario} | {_word(verdict)}, {verdict.seconds:.0f} s | {'; '.join(_spans(verdict.figures))} |"
        for verdict in report.verdicts
    ]
    return "\n\n".join([_head(report), "\n".join(lines)])


def _spans(figures: Sequence[Figure]) -> list[str]:
    """Returns each figure's name, and its least and its most value."""
    by_name: dict[str, list[Figure]] = {}
    for figure in figures:
        by_name.setdefault(figure.name, []).append(figure)
    spans = []
    for name, found in by_name.items():
        least, most = (str(end(found, key=lambda figure: figure.value)) for end in (min, max))
        spans.append(f"{name} {least}" if least == most else f"{name} {least} to {most}")
    return spans


def _head(report: Report) -> str:
    passed = sum(verdict.passed for verdict in report.verdicts)
    seconds = sum(verdict.seconds for verdict in report.verdicts)
    return (
        f"`make test-deploy` on {report.cores} cores ({report.cpu}), {report.measured} UTC: {passed} of "
        f"{len(report.verdicts)} scenarios passed, in {seconds / 60:.0f} minutes after the image was built. The image "
        f"has {report.image_bytes / 1e9:.2f} GB. Changed to fit the machine: {', '.join(report.changes)}."
    )


def _word(verdict: Verdict) -> str:
    return "passed" if verdict.passed else "**failed**"


def _scenario(verdict: Verdict) -> str:
    parts = [f"**{verdict.scenario.capitalize()}**: {_word(verdict)}, {verdict.seconds:.0f} s. {verdict.shows}"]
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
