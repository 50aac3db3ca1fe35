"""The user's own folders, by the XDG rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str]) -> Path:
    """For what can be made again: converted models."""
    return _xdg(environ, "XDG_CACHE_HOME", ".cache")


def state_folder(environ: Mapping[str, str]) -> Path:
    """For what has to stay: the secret of a cluster on one machine."""
    return _xdg(environ, "XDG_STATE_HOME", ".local/state")


def _xdg(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    folder = Path(environ.get(variable, ""))
    # The XDG rules say that a relative path counts as unset.
    return (folder if folder.is_absolute() else Path.home() / fallback) / "pdserve"
