"""Says which models are the same: whose KV blocks may be exchanged, and who may go on with whose answers.

It depends on the content of the model's files alone, not on where they lie or when they were written. Every byte of a
large file is digested in parallel and once: other processes, and later starts, find the result.

Who may exchange KV blocks, go on with another's answer, or map its packed weights relies on these digests. Those who
could want two models with one digest are the ones who supply both models, to an operator who serves them anyway. So the
digest of a file has 128 bits against chance, and is not cryptographic: XXH3 took a tenth of the time of SHA-256 (7 and
0.6 GB/s, one core). It depends on the bytes alone, and is the same on every host.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import xxhash

from pdserve.errors import ModelError
from pdserve.models.checkpoint.cached_files import CachedFiles, tell_nobody
from pdserve.models.checkpoint.gguf.file import gguf_parts, is_gguf
from pdserve.models.checkpoint.model_files import tokenizer_files, weight_files

log = logging.getLogger(__name__)

IN_BLOCKS = "blocks-"
"""The fingerprint of weights that stay in blocks begins so: the same weights dequantised give other KV blocks."""
LONG_CONTEXTS = "long-"
"""The fingerprint of a model that turns queries and keys otherwise for long contexts begins so, if it expects some."""
_SETTINGS = "config.json"
"""Files whose names end so (the configurations of model, generation and tokeniser) are compared by what they say."""
_VOLATILE = frozenset({"_name_or_path", "_model_name_or_path", "name_or_path", "transformers_version"})
"""Keys that say where a model came from and not how it computes."""
PIECE: Final = 2**26
"""The bytes of a piece, whose digest is one thread's work. It is part of what every digest means."""
REMEMBERED: Final = 2**24
"""Smaller files are read again, which takes milliseconds."""
_READ_AT_ONCE = 2**22
_THREADS = 8
"""More are no faster on any disk that one engine has for itself."""
_SETTLED_NS = 2 * 10**9
"""A file that changed this lately may change again and keep its ctime, which is as coarse as the kernel's clock."""
_MOST = 1024
_LOCK_TIMEOUT_S = 3600.0
"""Whoever waits for another process to read the file would only read it a second time, and slow that one down."""

_State = tuple[int, int, int, int, int]
_known: dict[_State, bytes] = {}
"""What this process has found or been given: it asks more than once, and may have no folder to remember in."""


def fingerprint(
    path: Path,
    cache_dir: Path | None = None,
    *,
    in_blocks: bool = False,
    long_contexts: bool = False,
    goes_on: Callable[[], None] = tell_nobody,
) -> str:
    """Returns a digest of all that a model's answers depend on: configuration, every byte of the weights, tokeniser,
    chat template, and which tokens end an answer.

    ``in_blocks`` says whether the model is computed from blocks, and not from dequantised weights, and
    ``long_contexts`` is ``DecoderConfig.turns_for_long_contexts``. Digests of large files are cached in ``cache_dir``,
    and ``goes_on`` is as ``content_digest`` has it. Raises ModelError.
    """
    form = (LONG_CONTEXTS if long_contexts else "") + (IN_BLOCKS if in_blocks else "")
    if is_gguf(path):  # It has all of that.
        return form + weights_fingerprint(path, cache_dir, goes_on)
    own = weights_fingerprint(path, cache_dir, goes_on)
    try:
        others = [(str(file.relative_to(path)), _content(file)) for file in tokenizer_files(path)]
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    return form + _digest([("weights", own.encode()), *others])


def weights_fingerprint(path: Path, cache_dir: Path | None = None, goes_on: Callable[[], None] = tell_nobody) -> str:
    """Returns a digest of what weights mean in memory: of the configuration, and every byte of the weights.

    It takes the arguments, and raises, as ``fingerprint`` does.
    """
    try:
        if is_gguf(path):
            parts = [content_digest(part, cache_dir, goes_on) for part in gguf_parts(path)]
            return parts[0].hex() if len(parts) == 1 else _digest(("part", part) for part in parts)
        weights = [(file.name, content_digest(file, cache_dir, goes_on)) for file in weight_files(path)]
        return _digest([(_SETTINGS, _content(path / _SETTINGS)), *weights])
    except (OSError, ValueError) as exc:
        raise _unreadable(path, exc) from exc


def _digest(parts: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, data in parts:
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _content(file: Path) -> bytes:
    data = file.read_bytes()
    if not file.name.endswith(_SETTINGS):
        return data
    try:
        return json.dumps(_lasting(json.loads(data)), sort_keys=True).encode()
    except ValueError:
        return data


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(each) for key, each in value.items() if key not in _VOLATILE}
    return value


def _unreadable(path: Path, exc: Exception) -> ModelError:
    return ModelError(f"{path} cannot be fingerprinted: {exc}")


def content_digest(path: Path, cache_dir: Path | None = None, goes_on: Callable[[], None] = tell_nobody) -> bytes:
    """Returns a digest of all bytes of a file, from ``cache_dir`` if the file has not changed since they were read.

    To read a large file from a slow disk takes many minutes: ``goes_on`` is called after each piece, and while another
    process reads the file. Raises OSError, and ModelError if the file changes while it is read.
    """
    with path.open("rb") as file:
        fd = file.fileno()
        state = _state(fd, path)
        if state[2] < REMEMBERED:
            return _read(fd, state, path, goes_on)
        found = _known.get(state)
        if found is None:
            # A change while it is read has another ctime only if it was settled before.
            settled = _is_settled(state)
            found = _found(fd, state, path, cache_dir if settled else None, goes_on)
            if settled:
                _known[state] = found
        return found


def _found(fd: int, state: _State, path: Path, cache_dir: Path | None, goes_on: Callable[[], None]) -> bytes:
    if cache_dir is None:
        return _read(fd, state, path, goes_on)
    cached = CachedFiles(cache_dir / "digests", "digest", _MOST, _LOCK_TIMEOUT_S)
    key = xxhash.xxh3_128_hexdigest(repr(state).encode())
    found: bytes | None = None
    try:
        if (known := cached.load(key)) is not None:
            return known
        with cached.locked(key, goes_on):
            found = cached.load(key)
            if found is None:
                found = _read(fd, state, path, goes_on)
                cached.save(key, found)
    except OSError as exc:
        log.warning("digests of weights cannot be cached in %s: %s", cached.folder, exc)
    return found if found is not None else _read(fd, state, path, goes_on)


def _state(fd: int, path: Path) -> _State:
    """Returns what changes with the bytes of a file. ``cp -p`` and images set an mtime; nobody sets a ctime."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{path} is no regular file")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _is_settled(state: _State) -> bool:
    return abs(time.time_ns() - state[4]) > _SETTLED_NS


def _read(fd: int, state: _State, path: Path, goes_on: Callable[[], None]) -> bytes:
    size = state[2]
    starts = range(0, size, PIECE)
    digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
    threads = max(1, min(_THREADS, len(os.sched_getaffinity(0)), len(starts)))
    with ThreadPoolExecutor(threads) as pool:
        try:
            for piece in pool.map(lambda start: _piece(fd, start, min(PIECE, size - start)), starts):
                digest.update(piece)
                goes_on()
        except EOFError as exc:
            raise _changed(path) from exc
        finally:
            pool.shutdown(cancel_futures=True)
    if _state(fd, path) != state:
        raise _changed(path)
    return digest.digest()


def _piece(fd: int, start: int, nbytes: int) -> bytes:
    """Returns the digest of a part of the file. The lock of the interpreter is free nearly all of the time."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(_READ_AT_ONCE, nbytes)))
    end = start + nbytes
    while start < end:
        count = os.preadv(fd, [buffer[: end - start]], start)
        if not count:
            raise EOFError
        digest.update(buffer[:count])
        start += count
    return digest.digest()


def _changed(path: Path) -> ModelError:
    return ModelError(f"{path} has changed while it was read: start the node when the file is complete")
