"""Measures how soon requests recover: ``python -m lab.fault_matrix --repeats 5 --json docs/reliability.json``.

It plays the cells of the table one after the other, and says what fails. It needs root, as the tests of hosts do.
What it measures of a cell takes the place of what the file had of it, unless it is to be added. Several runs of
different cells may share a file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from lab.fault_matrix.figures import put_cell
from lab.fault_matrix.models import LLAMA, MODELS, saved
from lab.fault_matrix.stages import Stages
from lab.fault_matrix.table import TESTED
from pdserve.settings import cache_folder
from tests.demo_folder import demo_folder
from tests.hosts.namespaces import why_impossible


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.fault_matrix", description=__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="each cell is played this often")
    parser.add_argument("--json", type=Path, help="the seconds are put into this file")
    parser.add_argument("--model", choices=MODELS, default=LLAMA.name, help="a model of windows or states, or none")
    parser.add_argument("--only", nargs="+", default=[""], help="only cells whose names have one of these in them")
    parser.add_argument("--add", action="store_true", help="what the file has of a cell is kept")
    parser.add_argument("--logs", type=Path, help="the logs of clusters in which a cell failed are kept here")
    options = parser.parse_args()
    if (reason := why_impossible()) is not None:
        parser.error(reason)
    failed = 0
    cells = [cell for cell in TESTED if any(part in cell.name for part in options.only)]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        folder = root / "model"
        folder.mkdir()
        model = saved(MODELS[options.model], demo_folder(cache_folder(os.environ)), folder)
        with Stages(model, lambda: Path(tempfile.mkdtemp(dir=root))) as stages:
            for cell in cells:
                seconds: list[float] = []
                for number in range(options.repeats):
                    try:
                        seconds.append(stages.play(cell))
                    except (AssertionError, ProcessLookupError) as exc:
                        print(f"{cell.name}: FAILED: {exc}", file=sys.stderr, flush=True)
                        if options.logs:
                            shutil.copytree(stages.folder, options.logs / f"{cell.name}-{number}", dirs_exist_ok=True)
                    else:
                        print(f"{cell.name}: {seconds[-1]:.3f} s", flush=True)
                failed += len(seconds) < options.repeats
                if options.json:
                    failures = options.repeats - len(seconds)
                    put_cell(options.json, cell.name, seconds, failures, add=options.add)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
