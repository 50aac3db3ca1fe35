"""Reads a model's tokenizer: with transformers the first time, and later from the user's cache.

transformers knows what all the files and settings of a tokenizer mean, but takes a second to import, and another one to
rebuild a GGUF file's tokenizer. What it makes of the files is kept as the one text that the library ``tokenizers``
reads.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import xxhash

from pdserve.errors import ModelError
from pdserve.models.checkpoint.cached_files import KeptFiles
from pdserve.models.checkpoint.code_digest import code_digest
from pdserve.models.checkpoint.content_digest import content_digest
from pdserve.models.checkpoint.gguf_file import forget_gguf, is_gguf

log = logging.getLogger(__name__)

_CODE = (Path(__file__), Path(__file__).with_name("gguf_file.py"), Path(__file__).with_name("gguf_tokenizer.py"))
"""What makes a tokenizer. Its bytes are part of each file's name, so that a change of the code makes another file."""
_KEPT = 16
"""So many tokenizers are kept, those that were used last."""
_LOCK_TIMEOUT_S = 60.0
TOKENIZER_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model")
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
    kept = KeptFiles(cache_dir / "tokenizers", "tokenizer", _KEPT, _LOCK_TIMEOUT_S)
    try:
        key = _key(model, cache_dir)
        if (found := _load(kept, key)) is not None:
            return found
        with kept.locked(key):
            found = _load(kept, key)
            if found is None:
                found = _made(model)
                try:
                    kept.save(key, msgspec.msgpack.encode(found))
                except OSError as exc:
                    log.warning("the tokenizer cannot be kept in %s: %s", kept.folder, exc)
    except OSError as exc:
        log.warning("tokenizers cannot be kept in %s: %s", kept.folder, exc)
        return _made(model)
    return found


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of a model's folder that its tokenizer and chat template may be made of."""
    return sorted(found for kind in TOKENIZER_FILES for found in folder.glob(kind))


def _key(model: Path, cache_dir: Path) -> str:
    """Returns a digest of everything that the tokenizer is made of, and of what makes it."""
    digest = xxhash.xxh3_128(code_digest(_CODE, ("transformers", "tokenizers")).encode())
    if is_gguf(model):
        digest.update(content_digest(model, cache_dir))
    else:
        for path in tokenizer_files(model):
            data = path.read_bytes()
            digest.update(f"\0{path.relative_to(model)}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()


def _load(kept: KeptFiles, key: str) -> KeptTokenizer | None:
    body = kept.load(key)
    try:
        return None if body is None else msgspec.msgpack.decode(body, type=KeptTokenizer)
    except msgspec.MsgspecError:
        return None


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
