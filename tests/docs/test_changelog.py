"""The changelog is by release, in short lines, and the newest release is the project's version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text()
LONGEST = 160
SECTIONS = ["Added", "Changed", "Fixed", "Removed"]


def test_the_newest_release_is_the_projects_version_and_can_be_tagged() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    releases = re.findall(r"^## \[([\d.]+)\](.*)$", TEXT, re.MULTILINE)
    assert releases[0][0] == version
    assert re.fullmatch(r" - \d{4}-\d\d-\d\d", releases[0][1])
    links = re.findall(r"^\[([\d.]+)\]: https://\S+$", TEXT, re.MULTILINE)
    assert links == [release for release, _ in releases]


def test_sections_come_in_one_order() -> None:
    for release in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert sections == [name for name in SECTIONS if name in sections]
        assert sections


def test_an_entry_is_one_short_line() -> None:
    lines = TEXT[TEXT.index("\n## ") :].splitlines()
    assert [line for line in lines if len(line) > LONGEST or line.startswith(" ")] == []
