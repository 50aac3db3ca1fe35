"""Makes a model of the hub complete in the cache, or says why it cannot be: the weights come last.

``python -m pdserve.hub.preparing ORDER`` does so, and writes messages as lines. It is a process of its own because
huggingface_hub, and the check of some models, take memory that a node would keep.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdserve.errors import HubError, ModelError
from pdserve.hub.cache import CachedRepository, cached_model
from pdserve.hub.download import DownloadEnded, DownloadFailed, DownloadOrder, DownloadProgress, Message, Note, in_gb
from pdserve.hub.fetching import Fetcher, Listing, RemoteFile, alone, list_files, look_up
from pdserve.hub.selection import HubName, Selection, check_gguf_start, check_listing, check_settings, hub_name, select
from pdserve.log_format import printable
from pdserve.models.checkpoint.model_files import INDEX, weight_files
from pdserve.process import die_with_parent

_REPORT_S = 0.2
_HEADER = 2**24
"""Bytes of a GGUF file that have its header, with all tokens of its tokeniser, for most models."""
_LARGEST_SETTING = 2**28
"""Bytes of the largest file that is not of weights. All of it is in memory."""


@dataclass
class Preparation:
    """One model on its way into the cache."""

    name: HubName
    cache: Path
    tell: Callable[[Message], None]
    _total: int = 0
    _done: int = 0
    _fetched: int = 0
    _told_at: float = field(default=float("-inf"))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, *, newest: bool) -> DownloadEnded:
        """Returns the model once it is complete. ``newest`` asks the hub even if a complete one is here.

        Raises ModelError and HubError.
        """
        repository = CachedRepository(self.cache, self.name.repository)
        with alone(repository, self._say):
            if not newest and (found := cached_model(self.cache, self.name)) is not None:
                # Another process has fetched it meanwhile.
                return DownloadEnded(str(found), repository.commit(self.name.revision), 0)
            listing = list_files(self.name, self._say)
            path = self._fetch(listing, repository)
            repository.name_commit(self.name.revision, listing.commit)
        return DownloadEnded(str(path), listing.commit, self._fetched)

    def missing(self) -> int:
        """Returns how many bytes of the model's weights are not here, if it can be served and the disk has space.

        Its settings are here then.

        Raises ModelError and HubError.
        """
        repository = CachedRepository(self.cache, self.name.repository)
        with alone(repository, self._say):
            listing = list_files(self.name, self._say)
            fetcher = Fetcher(listing, repository, self._move, self._say)
            weights = self._weights(listing, self._checked(listing, fetcher), fetcher)
            fetcher.check_free_space(weights)
            return fetcher.missing(weights)

    def _fetch(self, listing: Listing, repository: CachedRepository) -> Path:
        fetcher = Fetcher(listing, repository, self._move, self._say)
        selection = self._checked(listing, fetcher)
        weights = self._weights(listing, selection, fetcher)
        fetcher.check_free_space(weights)
        self._total, self._done = sum(file.nbytes for file in weights), sum(map(fetcher.present, weights))
        self._report(at_once=True)
        if selection.gguf:
            check_gguf_start(fetcher.fetch_start(weights[0], _HEADER), self.name)
        fetcher.fetch(weights)
        self._report(at_once=True)
        return fetcher.snapshot / selection.gguf if selection.gguf else fetcher.snapshot

    def _checked(self, listing: Listing, fetcher: Fetcher) -> Selection:
        """Fetches the settings, and returns what is served of the repository. Raises ModelError if nothing can be."""
        selection = select(self.name, set(listing.files))
        check_listing(listing.name, selection, listing.architecture)
        if selection.settings:
            settings = [look_up(listing, path, self._say) for path in selection.settings]
            if large := [file for file in settings if file.nbytes > _LARGEST_SETTING]:
                raise ModelError(
                    f"{self.name} cannot be served: its {large[0].path} has {in_gb(large[0].nbytes)}, and "
                    f"{in_gb(_LARGEST_SETTING)} of such a file are read at most"
                )
            fetcher.check_free_space(settings)
            fetcher.fetch(settings)
            check_settings(fetcher.snapshot, str(self.name), listing.formats)
        return selection

    def _weights(self, listing: Listing, selection: Selection, fetcher: Fetcher) -> list[RemoteFile]:
        """Returns the files whose weights are read: those of the index if there is one, or all that are selected."""
        paths = selection.weights
        if INDEX in selection.settings:
            paths = tuple(file.name for file in weight_files(fetcher.snapshot))
        if absent := sorted(set(paths) - set(listing.files)):
            raise ModelError(f"{self.name} cannot be served: its index names {absent[0]}, which it does not have")
        return [look_up(listing, path, self._say) for path in paths]

    def _move(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._fetched += max(0, nbytes)
            self._report()

    def _report(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._total and (at_once or now - self._told_at >= _REPORT_S):
            self._told_at = now
            self.tell(DownloadProgress(self._done, self._total))

    def _say(self, text: str) -> None:
        self.tell(Note(printable(text)))


_writing = threading.Lock()


def tell(message: Message) -> None:
    with _writing:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


def main(order: DownloadOrder) -> int:
    """Fetches the model, and says what becomes of it. Returns the exit status."""
    name = hub_name(order.model)
    if name is None:
        raise ValueError(f"{order.model!r} is no name of the hub")
    try:
        tell(Preparation(name, Path(order.cache), tell).run(newest=order.newest))
    except (ModelError, HubError) as error:
        tell(DownloadFailed(str(error), passing=isinstance(error, HubError)))
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    # The engine, which reads the same files, says what is to be said of them.
    logging.disable(logging.WARNING)
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=DownloadOrder)))
