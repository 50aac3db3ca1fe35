"""Tells on which kind of file system a file lies."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def file_system(file: Path | int) -> int:
    """Returns the magic number of the file system of a path or open file, with which ``struct statfs`` begins.

    Raises OSError.
    """
    libc, statfs = ctypes.CDLL(None, use_errno=True), (ctypes.c_long * 32)()
    failed = libc.fstatfs(file, statfs) if isinstance(file, int) else libc.statfs(os.fsencode(file), statfs)
    if failed:
        raise OSError(ctypes.get_errno(), "its file system is unknown")
    return int(statfs[0]) & 0xFFFFFFFF
