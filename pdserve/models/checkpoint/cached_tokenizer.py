"""Reads a model's tokenizer: with transformers the first time, and later from the user's cache.

transformers knows what all the files and settings of a tokenizer mean, but takes a second to import, and another one to
rebuild a GGUF file's tokenizer. What it makes of the files is cached as the one text that the library ``tokenizers``
reads.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from pdserve.errors import ModelError
from pdserve.models.checkpoint.cached_files import CachedFiles, code_digest
from pdserve.models.checkpoint.fingerprint import content_digest
from pdserve.models.checkpoint.gguf.file import GgufFile, forget_gguf, is_gguf, read_gguf
from pdserve.models.checkpoint.model_files import main_tokenizer, tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)

_CODE = (Path(__file__), Path(__file__).parent / "gguf" / "file.py")
"""What makes a tokenizer. Its bytes are part of each file's name, so that a change of the code makes another file."""
_PACKAGES = ("transformers", "tokenizers", "sentencepiece", "tiktoken")
_MOST = 16
"""So many tokenizers are cached, those that were used last."""
_LOCK_TIMEOUT_S = 60.0


SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
PARTS = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "add_prefix_space": "add_space_prefix",
}
"""transformers' names for what the file calls ``tokenizer.ggml.…``."""


SAME_SPLITS = {
    "chatglm-bpe": "llama-bpe",
    "glm4": "llama-bpe",
    "hunyuan": "qwen2",
    "solar-open": "qwen2",
    "stablelm2": "qwen2",
}
"""Names in ``tokenizer.ggml.pre`` that transformers does not know, and one that it knows for the same splits."""
GPT2_SPLITS = frozenset(
    {
        *("a.x-4.0", "exaone4", "gigachat", "gpt-2", "granite-docling", "jais", "mellum", "mpt", "olmo", "phi-2"),
        "trillion",
    }
)
"""Names whose splits are those of GPT-2, which transformers takes where it knows no other."""
DIGITS_APART = frozenset({"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"})
"""Names whose splits are those of GPT-2 with each digit apart: the same tokens, if no merge has a digit."""
_DIGIT = re.compile("[0-9]")


class CachedTokenizer(msgspec.Struct, frozen=True):
    """All that is needed of a tokenizer, without transformers."""

    backend: str
    """The text that ``tokenizers.Tokenizer.from_str`` reads."""
    special_tokens: dict[str, str]
    """The texts of the named special tokens, by names like ``bos_token``."""
    chat_template: str
    """The text of the chat template; empty if there is none."""
    split_special_tokens: bool
    """Whether special tokens that are written in a text are text."""


def read_tokenizer(model: Path, cache_dir: Path | None = None) -> CachedTokenizer:
    """Returns the tokenizer of a Hugging Face folder or GGUF file, if possible from ``cache_dir``. Raises ModelError.

    Several processes may call this at the same time: one makes the tokenizer, and the others wait for a while.
    """
    if cache_dir is None:
        return _made(model)
    cached = CachedFiles(cache_dir / "tokenizers", "tokenizer", _MOST, _LOCK_TIMEOUT_S)
    try:
        key = _key(model, cache_dir)
        if (found := _load(cached, key)) is not None:
            return found
        with cached.locked(key):
            found = _load(cached, key)
            if found is None:
                found = _made(model)
                try:
                    cached.save(key, msgspec.msgpack.encode(found))
                except OSError as exc:
                    log.warning("the tokenizer cannot be cached in %s: %s", cached.folder, exc)
    except OSError as exc:
        log.warning("tokenizers cannot be cached in %s: %s", cached.folder, exc)
        return _made(model)
    return found


def _key(model: Path, cache_dir: Path) -> str:
    """Returns a digest of everything that the tokenizer is made of, and of what makes it."""
    digest = xxhash.xxh3_128(code_digest(_CODE, _PACKAGES).encode())
    if is_gguf(model):
        digest.update(content_digest(model, cache_dir))
    else:
        for path in tokenizer_files(model):
            data = path.read_bytes()
            digest.update(f"\0{path.relative_to(model)}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()


def _load(cached: CachedFiles, key: str) -> CachedTokenizer | None:
    body = cached.load(key)
    try:
        return None if body is None else msgspec.msgpack.decode(body, type=CachedTokenizer)
    except msgspec.MsgspecError:
        return None


def _made(model: Path) -> CachedTokenizer:
    """Returns the tokenizer that transformers makes. Raises ModelError."""
    try:
        if is_gguf(model):
            made = gguf_tokenizer(model)
            forget_gguf()
        else:
            made = _folder_tokenizer(model, main_tokenizer(model))
        return CachedTokenizer(
            backend=made.backend_tokenizer.to_str(),
            special_tokens=dict(made.special_tokens_map),
            chat_template=made.get_chat_template() if made.chat_template else "",
            split_special_tokens=bool(made.split_special_tokens),
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as exc:
        raise ModelError(f"cannot read the tokenizer in {model}: {exc}") from exc


def _folder_tokenizer(folder: Path, file: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer in ``file`` of a folder.

    Raises ModelError if a package is missing, or if the tokenizer is none that the library ``tokenizers`` can be.
    """
    if file.name == "tokenizer.json":
        from transformers import PreTrainedTokenizerFast

        fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        return fast
    if file.name == "tekken.json":
        mistral: Any = importlib.import_module("transformers.integrations.mistral")
        made: Any = mistral.convert_tekken_tokenizer(str(file))
        # Mistral's own library begins every prompt with it.
        made.add_bos_token = True
        return made  # type: ignore[no-any-return]  # the package has no types
    with file.open("rb") as opened:
        # Both kinds have this name: a message of protocol buffers, or lines of base64.
        package = "sentencepiece" if opened.read(1) == b"\n" else "tiktoken"
    if importlib.util.find_spec(package) is None:
        raise ModelError(
            f"the tokenizer in {file} is read with the package {package}, which is not installed: "
            "pip install 'pdserve[tokenizers]'"
        )
    auto: Any = importlib.import_module("transformers").AutoTokenizer
    made = auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if not hasattr(made, "backend_tokenizer"):
        raise ModelError(f"the tokenizer in {file} is not supported: {type(made).__name__} of transformers computes it")
    return made  # type: ignore[no-any-return]


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer. Raises ModelError if the file holds none that transformers can rebuild.

    transformers' own reader of the file is not used, because it imports torch, which the API process can do without.
    """
    from transformers import PreTrainedTokenizerFast

    file = read_gguf(path)
    metadata = file.metadata
    parts = {name: metadata[key] for name, part in PARTS.items() if (key := f"tokenizer.ggml.{part}") in metadata}
    # The module has no types, and its package loads it lazily.
    conversion: Any = importlib.import_module("transformers.integrations.gguf")
    if file.get("tokenizer.ggml.model", str, "") == "gpt2" and "pre_tokenizer_type" in parts:
        given = file.get("tokenizer.ggml.pre", str)
        known: Any = importlib.import_module(conversion.convert_gguf_tokenizer.__module__)
        merges = file.get("tokenizer.ggml.merges", list, [])
        digits = any(_DIGIT.search(str(merge)) for merge in merges)
        as_gpt2 = given in GPT2_SPLITS or (given in DIGITS_APART and not digits)
        if given not in known.GGUF_PRE_TOKENIZER_SPLITS and given not in SAME_SPLITS and not as_gpt2:
            # Text would be split as GPT-2 splits it, and then the tokens are not those that the model has learned.
            raise ModelError(f"tokenizer.ggml.pre {given!r} of {path}, how text is split, is not supported")
        parts["pre_tokenizer_type"] = SAME_SPLITS.get(given, given)
    build: Any = PreTrainedTokenizerFast
    try:
        backend, settings = conversion.convert_gguf_tokenizer(file.architecture, parts)
        tokenizer: PreTrainedTokenizerFast = build(tokenizer_object=backend, **settings, **_settings(file))
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise ModelError(f"cannot read the tokenizer in {path}: {exc}") from exc
    return tokenizer


def _settings(file: GgufFile) -> dict[str, Any]:
    tokens = file.get("tokenizer.ggml.tokens", list)
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in SPECIAL.items()}
    # llama.cpp begins a sentencepiece prompt with BOS where the file says nothing.
    sentencepiece = file.get("tokenizer.ggml.model", str) == "llama"
    return {
        **{name: tokens[token_id] for name, token_id in found.items() if isinstance(token_id, int)},
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", bool, sentencepiece),
        "add_eos_token": file.get("tokenizer.ggml.add_eos_token", bool, False),
        "chat_template": file.get("tokenizer.chat_template", str, ""),
    }
