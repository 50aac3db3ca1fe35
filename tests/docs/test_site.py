"""Tests that the pages become a site: its links and anchors lead somewhere, and it loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.integration


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site of the pages in ``root`` as ``make docs`` does."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        root / "mkdocs.yml",
        "-d",
        site,
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A copy of the project with one page, whose site can be spoilt. Returns the page."""
    (tmp_path / "tests" / "docs").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "docs" / "site_hooks.py", tmp_path / "tests" / "docs")
    text = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(text.partition("\nnav:\n")[0] + "\nnav: [index.md]\n")
    page = tmp_path / "docs" / "index.md"
    page.parent.mkdir()
    page.write_text("# Page\n\n## Part\n\nText with a list:\n* [part](#part)\n* [code](../tests/docs/site_hooks.py)\n")
    return page


class Loads(HTMLParser):
    """Collects what a browser loads to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        if tag == "link" and of.get("rel") not in ("next", "prev"):
            self.found.append(of.get("href") or "")
        self.found += [of[name] or "" for name in ("src", "srcset", "data", "poster") if name in of]


def loaded(page: Path) -> list[str]:
    loads = Loads()
    loads.feed(page.read_text())
    return loads.found


def test_the_site_has_every_page_and_a_search(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if page.parts[0] != "new"}
    assert pages <= {page.relative_to(site) for page in site.rglob("*.html")}
    index = (site / "search" / "search_index.json").read_text()
    assert "PdserveNoProxy" in index


def test_pages_load_only_their_own_files(site: Path) -> None:
    for page in site.rglob("*.html"):
        base = site if page.name == "404.html" else page.parent
        for target in loaded(page):
            assert not re.match(r"(?:https?:)?//", target), f"{page.name} loads {target}"
            if not target.startswith(("data:", "/")):
                assert (base / target.partition("?")[0]).exists(), f"{page.name} loads {target}"


def test_a_right_page_is_built(small: Path, tmp_path: Path) -> None:
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    shown = (tmp_path / "site" / "index.html").read_text()
    assert '<li><a href="#part">part</a></li>' in shown
    assert 'site_hooks.py"' not in shown


SPOILT = {
    "[gone](gone.md)": "'gone.md'",
    "[gone](#gone)": "'#gone'",
    "[gone](../gone.py)": "../gone.py, which is not there",
    '<img src="https://elsewhere.example/picture.png">': "loads https://elsewhere.example/picture.png",
    "<style>@import 'https://elsewhere.example/a.css'</style>": "loads https://elsewhere.example/a.css",
}
"""What spoils a page, and what the warning of it says."""


def test_each_spoilt_part_of_a_page_is_a_warning_which_fails_the_build(small: Path, tmp_path: Path) -> None:
    small.write_text("\n\n".join([small.read_text(), *SPOILT]))
    small.with_name("more.md").write_text("# More\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    warnings = [line for line in built.stderr.splitlines() if line.startswith("WARNING")]
    assert "  - more.md" in built.stderr
    for said in (*SPOILT.values(), "exist in the docs directory, but are not included"):
        assert sum(said in warning for warning in warnings) == 1, (said, warnings)
    assert f"Aborted with {len(warnings)} warnings in strict mode" in built.stdout
