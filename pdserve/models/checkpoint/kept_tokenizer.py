"""Reads a model's tokenizer: with transformers the first time, and later from the user's cache.

transformers knows what all the files and settings of a tokenizer mean, but takes a second to import, and another one to
rebuild a GGUF file's tokenizer. What it makes of the files is kept as the one text that the library ``tokenizers``
reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash
from filelock import FileLock, Timeout

from pdserve.errors import ModelError
from pdserve.models.checkpoint.code_digest import code_digest
from pdserve.models.checkpoint.gguf_file import forget_gguf, is_gguf

log = logging.getLogger(__name__)

_CODE = (Path(__file__), Path(__file__).with_name("gguf_file.py"), Path(__file__).with_name("gguf_tokenizer.py"))
"""What makes a tokenizer. Its bytes are part of each file's name, so that a change of the code makes another file."""
_KEPT = 16
"""So many tokenizers are kept, those that were used last."""
_LOCK_TIMEOUT_S = 60.0
_DEAD_DRAFT_S = 3600.0
"""A draft that is older was left by a process that has died: to write one takes milliseconds."""
_HEAD_BYTES = 2**25
"""A GGUF file's tokenizer lies in its first part, before the weights."""
_DIGEST_BYTES = 16
_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model")
"""The files of a folder that a tokenizer may be made of."""


class KeptTokenizer(msgspec.Struct, frozen=True):
    """All that is needed of a tokenizer, without transformers."""

    backend: str
    """The text that ``tokenizers.Tokenizer.from_str`` reads."""
    special_tokens: dict[str, str]
    """The texts of the named special tokens, by names like ``bos_token``."""
    chat_template: str
    """The text of the chat template; empty if there is none."""
    split_special_tokens: bool
    """Whether special tokens that are written in a text are text."""


def read_tokenizer(model: Path, cache_dir: Path | None = None) -> KeptTokenizer:
    """Returns the tokenizer of a Hugging Face folder or GGUF file, if possible from ``cache_dir``. Raises ModelError.

    Several processes may call this at the same time: one makes the tokenizer, and the others wait for a while.
    """
    if cache_dir is None:
        return _made(model)
    folder = cache_dir / "tokenizers"
    try:
        path = folder / f"{_key(model)}.tokenizer"
        if (found := _load(path)) is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            found = _load(path)
            if found is None:
                found = _made(model)
                try:
                    _save(path, found)
                except OSError as exc:
                    log.warning("the tokenizer cannot be kept in %s: %s", folder, exc)
    except OSError as exc:
        log.warning("tokenizers cannot be kept in %s: %s", folder, exc)
        return _made(model)
    return found


def _key(model: Path) -> str:
    """Returns a digest of everything that the tokenizer is made of, and of what makes it."""
    digest = xxhash.xxh3_128(code_digest(_CODE, ("transformers", "tokenizers")).encode())
    if is_gguf(model):
        with model.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
        status = model.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    else:
        for path in sorted(found for kind in _FILES for found in model.glob(kind)):
            digest.update(f"\0{path.relative_to(model)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock, or goes on without it where another process has held it for long."""
    lock = FileLock(path)
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=_LOCK_TIMEOUT_S)
    try:
        yield
    finally:
        lock.release()


def _load(path: Path) -> KeptTokenizer | None:
    """Returns a kept tokenizer, or None if it is not there or not whole."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    body = memoryview(data)[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:_DIGEST_BYTES]:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    try:
        return msgspec.msgpack.decode(body, type=KeptTokenizer)
    except msgspec.MsgspecError:
        return None


def _save(path: Path, tokenizer: KeptTokenizer) -> None:
    body = msgspec.msgpack.encode(tokenizer)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".draft", delete=False) as draft:
        try:
            draft.write(xxhash.xxh3_128_digest(body) + body)
            # Whoever shares the cache may read it. A temporary file is its maker's alone.
            os.fchmod(draft.fileno(), 0o644)
            draft.close()
            os.rename(draft.name, path)
        except BaseException:
            os.unlink(draft.name)
            raise
    _remove_old(path.parent)


def _remove_old(folder: Path) -> None:
    """Removes all but the tokenizers that were used last, and the drafts that dead processes have left."""
    ages = _ages(folder, "*.tokenizer")
    for old in sorted(ages, key=lambda each: ages[each])[_KEPT:]:
        old.unlink(missing_ok=True)
        old.with_suffix(".lock").unlink(missing_ok=True)
    for draft, age in _ages(folder, ".*.draft").items():
        if age > _DEAD_DRAFT_S:
            draft.unlink(missing_ok=True)


def _ages(folder: Path, pattern: str) -> dict[Path, float]:
    """Returns the files and the seconds since each was used, without those that another process removes meanwhile."""
    now, ages = time.time(), {}
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            ages[path] = now - path.stat().st_mtime
    return ages


def _made(model: Path) -> KeptTokenizer:
    """Returns the tokenizer that transformers makes. Raises ModelError."""
    from transformers import PreTrainedTokenizerFast

    try:
        if is_gguf(model):
            from pdserve.models.checkpoint.gguf_tokenizer import gguf_tokenizer

            made = gguf_tokenizer(model)
            forget_gguf()
        elif (model / "tokenizer.json").is_file():
            made = PreTrainedTokenizerFast.from_pretrained(str(model), local_files_only=True)
        else:
            raise ModelError(f"{model} has no tokenizer.json")
        return KeptTokenizer(
            backend=made.backend_tokenizer.to_str(),
            special_tokens=dict(made.special_tokens_map),
            chat_template=made.get_chat_template() if made.chat_template else "",
            split_special_tokens=bool(made.split_special_tokens),
        )
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ModelError(f"cannot read the tokenizer in {model}: {exc}") from exc
