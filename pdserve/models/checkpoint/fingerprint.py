"""Says which models are the same: whose KV blocks may be exchanged, and who may go on with whose answers.

It depends on the content of the model's files alone, not on where they lie or when they were written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pdserve.errors import ModelError
from pdserve.models.checkpoint.cached_files import tell_nobody
from pdserve.models.checkpoint.cached_tokenizer import tokenizer_files
from pdserve.models.checkpoint.content_digest import content_digest
from pdserve.models.checkpoint.gguf_file import is_gguf
from pdserve.models.checkpoint.model_files import weight_files

IN_BLOCKS = "blocks-"
"""The fingerprint of weights that are kept in blocks begins so: the same weights dequantised give other KV blocks."""
_SETTINGS = "config.json"
"""Files whose names end so (the configurations of model, generation and tokeniser) are compared by what they say."""
_VOLATILE = frozenset({"_name_or_path", "_model_name_or_path", "name_or_path", "transformers_version"})
"""Keys that say where a model came from and not how it computes."""


def fingerprint(
    path: Path,
    cache_dir: Path | None = None,
    *,
    in_blocks: bool = False,
    goes_on: Callable[[], None] = tell_nobody,
) -> str:
    """Returns a digest of all that a model's answers depend on: configuration, every byte of the weights, tokeniser,
    chat template, and which tokens end an answer.

    ``in_blocks`` says whether the model is computed from the file's blocks, and not from dequantised weights. Digests
    of large files are kept in ``cache_dir``, and ``goes_on`` is as ``content_digest`` has it. Raises ModelError.
    """
    if is_gguf(path):  # The one file has all of that.
        return (IN_BLOCKS if in_blocks else "") + weights_fingerprint(path, cache_dir, goes_on)
    own = weights_fingerprint(path, cache_dir, goes_on)
    try:
        others = [(str(file.relative_to(path)), _content(file)) for file in tokenizer_files(path)]
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    return _digest([("weights", own.encode()), *others])


def weights_fingerprint(path: Path, cache_dir: Path | None = None, goes_on: Callable[[], None] = tell_nobody) -> str:
    """Returns a digest of what weights mean in memory: of the configuration, and every byte of the weights.

    It takes the arguments, and raises, as ``fingerprint`` does.
    """
    try:
        if is_gguf(path):
            return content_digest(path, cache_dir, goes_on).hex()
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
