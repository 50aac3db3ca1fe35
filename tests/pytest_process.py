"""A process of ``pytest -n`` as a fork: ``python -m tests.pytest_process -u -c CODE``, as execnet starts a Python."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv[-1])
