"""Tells on which kind of file system a file lies, and whether other users could have changed it."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ALL = stat.S_IRWXG | stat.S_IRWXO


def file_system(file: Path | int) -> int:
    """Returns the magic number of the file system of a path or open file, with which ``struct statfs`` begins.

    Raises OSError.
    """
    libc, statfs = ctypes.CDLL(None, use_errno=True), (ctypes.c_long * 32)()
    failed = libc.fstatfs(file, statfs) if isinstance(file, int) else libc.statfs(os.fsencode(file), statfs)
    if failed:
        raise OSError(ctypes.get_errno(), "its file system is unknown")
    return int(statfs[0]) & 0xFFFFFFFF


def make_own_folder(path: Path) -> None:
    """Makes a folder that is for files of this user's, or sees to it that nobody else can put files there.

    Raises OSError, with a reason for people, if another user can: code and weights are loaded from such folders.
    """
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    keep_own_folder(path)


def keep_own_folder(path: Path) -> None:
    """Does what ``make_own_folder`` does for a folder that is there already. Raises FileNotFoundError, too."""
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & OTHERS_WRITE:
        # As a umask of 002 has made it, which many systems have. What others have put there is theirs, or they may
        # write to it: ``check_own`` tells.
        path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)
        found = path.stat()
    check_own(found)


def check_own(found: os.stat_result, forbidden: int = OTHERS_WRITE) -> None:
    """Raises PermissionError if a file or folder is not this user's or root's, or its mode has any ``forbidden`` bit.

    By default, nobody else can have written to what passes.
    """
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, f"it belongs to another user (uid {found.st_uid})")
    if found.st_mode & forbidden:
        raise PermissionError(errno.EPERM, f"its mode, {found.st_mode & 0o777:o}, lets other users in")


def is_own_file(path: Path) -> bool:
    """Returns whether there is a file at ``path`` to which no other user could have written."""
    try:
        found = path.stat()
        check_own(found)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode)
