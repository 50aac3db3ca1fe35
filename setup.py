"""Builds what the source does not have: a README for the package index, and the description of the HTTP interface.

The links and pictures of that README do not need this repository around them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_LINK = re.compile(r"""(?P<before>\]\(|\b(?:src|srcset|href)=")(?!\w+:|\#)(?P<path>[^)"\s]+)""", re.VERBOSE)
_PICTURES = (".png", ".svg", ".jpg", ".gif", ".webp")


def absolute_links(page: str, source: str, tag: str) -> str:
    """Returns the Markdown text ``page`` with its relative links as links into the repository ``source`` at ``tag``."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["path"].endswith(_PICTURES) else "blob"
        return f"{link['before']}{source}/{kind}/{tag}/{link['path']}"

    return _LINK.sub(absolute, page)


def write_description(root: str) -> None:
    """Writes the description of the HTTP interface, which the types make, into the packages below ``root``."""
    sys.path.insert(0, str(ROOT))
    from pdserve.api.routes.description import render

    Path(root, "pdserve", "http", "openapi.json").write_text(render(), encoding="utf-8")


class BuildWithDescription(build_py):
    """Builds the packages. An editable install has no description: a source tree makes it when it is asked for."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_description(self.build_lib)


class SourceWithDescription(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_description(base_dir)


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": BuildWithDescription, "sdist": SourceWithDescription},
        long_description=absolute_links(
            (ROOT / "README.md").read_text(encoding="utf-8"), PROJECT["urls"]["Source"], f"v{PROJECT['version']}"
        ),
        long_description_content_type="text/markdown",
    )
