"""Writes the figures of the manifests in docs/benchmarks.md: ``python -m lab.deploy_containers.page``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.pages.page_part import with_part
from lab.deploy_containers.report import read_report, summary

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
REPORT = ROOT / "docs" / "benchmarks" / "deploy" / "report.json"
LAST_RUN = ROOT / ".deploy" / "report.json"
BEGIN = "<!-- written by lab/deploy_containers/page.py from deploy/report.json -->"


def written(text: str, part: str) -> str:
    """Returns the page's ``text`` with ``part`` in its place."""
    return with_part(text, BEGIN, part)


def main() -> int:
    if LAST_RUN.exists():
        if not read_report(LAST_RUN).passed:
            print(f"{LAST_RUN} has not passed", file=sys.stderr)
            return 1
        shutil.copyfile(LAST_RUN, REPORT)
    PAGE.write_text(written(PAGE.read_text(), summary(read_report(REPORT))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
