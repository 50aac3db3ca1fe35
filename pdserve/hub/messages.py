"""What the process that fetches a model says, a line of JSON for each message."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class DownloadProgress(msgspec.Struct, frozen=True, tag=True):
    """How much of the download is there. ``done`` begins with what an earlier download has left."""

    done: int
    total: int
    """Bytes of all files that are served, except those that were there."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """A sentence for the user."""

    text: str


class DownloadEnded(msgspec.Struct, frozen=True, tag=True):
    """The model is whole. This is the last message."""

    path: str
    """The folder or GGUF file."""
    commit: str
    fetched: int
    """How many bytes came over the network."""


class DownloadFailed(msgspec.Struct, frozen=True, tag=True):
    """Why there is no model. This is the last message."""

    message: str
    passing: bool
    """Whether the same may work later, without a change of settings."""


Message: TypeAlias = DownloadProgress | Note | DownloadEnded | DownloadFailed


class DownloadOrder(msgspec.Struct, frozen=True):
    """What the process is to fetch."""

    model: str
    """A name of the hub."""
    cache: str
    """The folder of cached models."""
    newest: bool = False
    """Whether the hub is asked even if the model is whole in the cache."""
