"""Measures how soon requests recover: ``python -m tests.faults.matrix --repeats 5 --json docs/reliability.json``.

It plays the cells of the table one after the other, and says what fails. It needs root, as the tests of hosts do.
Some runs may go on at the same time, of other cells, and add to the same file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from pdserve.settings import cache_folder
from tests.demo_folder import demo_folder
from tests.faults.matrix.figures import Figures, read_figures, write_figures
from tests.faults.matrix.stages import Stages
from tests.faults.matrix.table import TESTED
from tests.hosts.cluster import tiny_model
from tests.hosts.namespaces import why_impossible


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="each cell is played this often")
    parser.add_argument("--json", type=Path, help="the seconds are added to this file")
    parser.add_argument("--only", default="", help="only cells whose names have this in them")
    options = parser.parse_args()
    if (reason := why_impossible()) is not None:
        parser.error(reason)
    figures = read_figures(options.json) if options.json and options.json.exists() else Figures()
    failed = 0
    cells = [cell for cell in TESTED if options.only in cell.name]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = root / "model"
        model.mkdir()
        tiny_model(demo_folder(cache_folder(os.environ)), model)
        with Stages(model, lambda: Path(tempfile.mkdtemp(dir=root))) as stages:
            for cell in (cell for cell in cells for _ in range(options.repeats)):
                try:
                    seconds = stages.play(cell)
                except AssertionError as exc:
                    failed += 1
                    print(f"{cell.name}: FAILED: {exc}", file=sys.stderr, flush=True)
                    figures = figures.having_failed(cell.name)
                else:
                    print(f"{cell.name}: {seconds:.3f} s", flush=True)
                    figures = figures.having(cell.name, seconds)
                if options.json:
                    write_figures(options.json, figures)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
