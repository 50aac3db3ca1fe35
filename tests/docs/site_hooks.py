"""What ``mkdocs`` asks while it builds the site: links that leave ``docs/``, and resources of other servers."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
log = logging.getLogger("mkdocs.hooks.site")

_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_LIST_AFTER_TEXT = re.compile(r"(?m)^(?![*\-|#>] |\d+\. |\s|```)(\S.*)\n(?=(?:[*-]|1\.) )")
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|link(?![^>]*rel="?(?:canonical|next|prev)))\b[^>]*?"""
    r"""(?:src|href|srcset)="?((?:https?:)?//[^\s">]+)""",
    re.IGNORECASE,
)
_LOADED_BY_STYLE = re.compile(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^\s"')]+)""", re.IGNORECASE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Returns the page's text with its links to files outside ``docs/`` mended, and its lists apart from the text."""
    docs = Path(config["docs_dir"])
    folder = Path(page.file.abs_src_path).parent
    parts, at = [], 0
    for fence in _FENCED.finditer(markdown):
        parts += [_prose(markdown[at : fence.start()], folder, docs, config["repo_url"]), fence[0]]
        at = fence.end()
    return "".join([*parts, _prose(markdown[at:], folder, docs, config["repo_url"])])


def _prose(text: str, folder: Path, docs: Path, source: str | None) -> str:
    linked = _LINK.sub(lambda link: _link(link, folder, docs, source), text)
    # Python-Markdown begins a list after a blank line only; the repository's view does not mind one.
    return _LIST_AFTER_TEXT.sub(r"\1\n\n", linked)


def _link(link: re.Match[str], folder: Path, docs: Path, source: str | None) -> str:
    _, text, target = link.groups()
    if re.match(r"(?:[a-z]+:|//|#)", target):
        return link[0]
    path, _, anchor = target.partition("#")
    file = Path(os.path.normpath(folder / path))
    if file.is_relative_to(docs):
        return link[0]
    if not file.exists():
        log.warning("%s has a link to %s, which is not there", folder.relative_to(docs), target)
    if not source:
        return text
    there = file.relative_to(docs.parent).as_posix()
    return f"[{text}]({source.rstrip('/')}/{there}{'#' + anchor if anchor else ''})"


def on_post_build(*, config: Any, **_: Any) -> None:
    """Warns of each page that loads something from another server."""
    for file in sorted(Path(config["site_dir"]).rglob("*")):
        if file.suffix in (".html", ".css"):
            text = file.read_text(encoding="utf-8")
            found = {*_LOADED.findall(text), *_LOADED_BY_STYLE.findall(text)}
            if 'class="mermaid"' in text:
                found.add("the scripts that draw Mermaid")
            for what in sorted(found):
                log.warning("%s loads %s", file.relative_to(config["site_dir"]), what)
