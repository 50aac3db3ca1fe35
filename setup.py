"""Gives the package index a README whose links and pictures do not need this repository around them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

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


if __name__ == "__main__":
    setup(
        long_description=absolute_links(
            (ROOT / "README.md").read_text(encoding="utf-8"), PROJECT["urls"]["Source"], f"v{PROJECT['version']}"
        ),
        long_description_content_type="text/markdown",
    )
