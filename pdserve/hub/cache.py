"""The folder in which all programs of Hugging Face keep models: what is in it, and how a file gets there.

    models--org--name/refs/main                       the commit that a branch or tag had when it was last looked up
    models--org--name/blobs/DIGEST                    the bytes of a file
    models--org--name/snapshots/COMMIT/config.json    a link to the bytes that the file has in this commit

Huggingface_hub documents this layout and shares it with other programs. It is read here without that library, so that
a model that is there starts as quickly as a folder does, without a question to anybody.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import ModelError
from pdserve.hub.selection import GGUF, HubName, label_of, parts_of
from pdserve.models.checkpoint.gguf.file import gguf_parts
from pdserve.models.checkpoint.model_files import INDEX, SINGLE_FILE, TOKENIZERS, weight_files

_PREFIX = "models--"
_COMMIT = re.compile("[0-9a-f]{40}")
CONFIG = "config.json"
PARTIAL = ".pdserve.partial"
"""The end of the name of a file that pdserve has begun to fetch. The next fetch goes on with it."""


def cache_of(environ: Mapping[str, str]) -> Path:
    """Returns the folder of cached models, by the variables that huggingface_hub has for it."""
    home = environ.get("XDG_CACHE_HOME") or "~/.cache"
    hugging_face = environ.get("HF_HOME") or f"{home}/huggingface"
    named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{hugging_face}/hub"
    return Path(os.path.expanduser(os.path.expandvars(named)))


def repository_of(path: Path) -> str:
    """Returns the repository that a snapshot in a cache, or a file in one, came from; empty for other paths."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith(_PREFIX):
            return _repository(folder.parent.parent.name)
    return ""


def _repository(folder_name: str) -> str:
    return folder_name.removeprefix(_PREFIX).replace("--", "/", 1)


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """What a cache has of one repository, which may be nothing."""

    cache: Path
    name: str
    """The repository, as ``org/name``."""

    @property
    def folder(self) -> Path:
        return self.cache / (_PREFIX + self.name.replace("/", "--"))

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    def commit(self, revision: str) -> str:
        """Returns the commit of a revision as it was last looked up; empty if it never was."""
        if _COMMIT.fullmatch(revision):
            return revision if self.snapshot(revision).is_dir() else ""
        try:
            found = (self.folder / "refs" / revision).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return found if _COMMIT.fullmatch(found) else ""

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def snapshots(self) -> list[Path]:
        """Returns the folders of all commits, newest first."""
        return sorted((self.folder / "snapshots").glob("*/"), key=lambda each: each.stat().st_mtime, reverse=True)

    def revisions(self, commit: str) -> list[str]:
        """Returns the branches and tags that were this commit when they were last looked up."""
        refs = self.folder / "refs"
        return sorted(str(ref.relative_to(refs)) for ref in refs.rglob("*") if ref.is_file() and commit in _text(ref))

    def nbytes(self) -> int:
        """Returns the size of all that the cache has of it, parts of files included."""
        return sum(map(_size, self.folder.rglob("*")))

    def name_commit(self, revision: str, commit: str) -> None:
        """Notes the commit of a branch or tag. Raises OSError."""
        if _COMMIT.fullmatch(revision):
            return
        ref = self.folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)

    def link(self, commit: str, path: str, blob: Path) -> None:
        """Puts a file whose bytes are in ``blob`` into a commit's folder. Raises OSError."""
        link = self.snapshot(commit) / path
        if link.exists():
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


def repositories(cache: Path) -> Iterator[CachedRepository]:
    """Yields all repositories of models in a cache, by name."""
    for folder in sorted(cache.glob(f"{_PREFIX}*--*/")):
        yield CachedRepository(cache, _repository(folder.name))


def cached_model(cache: Path, name: HubName) -> Path | None:
    """Returns the folder or file of a model if all that is served of it is in the cache.

    Raises ModelError if the name fits several files there.
    """
    repository = CachedRepository(cache, name.repository)
    commit = repository.commit(name.revision)
    return snapshot_model(repository.snapshot(commit), name) if commit else None


def snapshot_model(snapshot: Path, name: HubName) -> Path | None:
    """Returns what is served of a commit's folder, or None if not all of it is there. Raises ModelError."""
    if name.file:
        return _whole(snapshot / name.file)
    if not name.quantisation and is_complete(snapshot):
        return snapshot
    files = {str(file.relative_to(snapshot)) for file in snapshot.rglob(f"*{GGUF}") if file.is_file()}
    labels = {parts_of(file)[0] for file in files if label_of(file) == name.quantisation.upper()}
    # A name without a label means the only file of a repository, and the hub says how many that has.
    return _whole(snapshot / labels.pop()) if name.quantisation and len(labels) == 1 else None


def _whole(file: Path) -> Path | None:
    """Returns the first part of the GGUF file that ``file`` is a part of, or None if not all of them are there."""
    parts = gguf_parts(file)
    return parts[0] if all(part.is_file() for part in parts) else None


def is_complete(snapshot: Path) -> bool:
    """Returns whether a commit's folder has the weights and the tokenizer of a model. Weights are fetched last."""
    if not (snapshot / CONFIG).is_file() or not any((snapshot / name).is_file() for name in TOKENIZERS):
        return False
    if not (snapshot / INDEX).is_file() and not (snapshot / SINGLE_FILE).is_file():
        return False
    try:
        return all(file.is_file() for file in weight_files(snapshot))
    except ModelError:
        return False


def _size(file: Path) -> int:
    """Returns the size of a file; 0 for all else, and for one that another process has renamed meanwhile."""
    try:
        found = file.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
