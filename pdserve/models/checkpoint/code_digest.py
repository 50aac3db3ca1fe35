"""Tells which code makes a file of the user's cache, so that other code does not take that file for its own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

import xxhash


def code_digest(sources: Iterable[Path], packages: Iterable[str] = ()) -> str:
    """Returns a digest of these files and of the versions of pdserve and ``packages``. Raises OSError."""
    digest = xxhash.xxh3_128()
    for package in ("pdserve", *packages):
        digest.update(f"{package} {_version(package)}\0".encode())
    for source in sources:
        data = source.read_bytes()
        digest.update(f"{source.name} {len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
