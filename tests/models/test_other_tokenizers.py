"""Tests tokenizers that are not in a ``tokenizer.json``: their ids are those of the libraries that made the files."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tiktoken

from pdserve.api.requests.tokenizer import load_tokenizer
from pdserve.errors import ModelError
from pdserve.grammars.compiling import load_vocabulary
from pdserve.models.checkpoint.cached_tokenizer import read_tokenizer

TEXTS = [
    "Hello",
    "The  capital of France, isn't it?",
    "  The  capital of France, isn't it? 12345\n\n\tété 漢字 🙂",
    "the weather at noon",
    " a",
    "",
]
SENTENCES = [
    "The keeper of the lighthouse writes down the weather four times a day.",
    "At noon two ships passed, and the larger one carried timber from the north.",
    "In the evening he lit the lamp, wound the clock, and read until the rain began.",
] * 20
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
RANKS = [*(bytes([i]) for i in range(256)), *(b"th", b"he", b"the", b" the", b"er", b"in", b" w", b"at", b"our", b"ou")]


def settings(folder: Path, **values: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 600}))
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def pieces() -> bytes:
    """Returns a model of sentencepiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture
def llama(tmp_path: Path, pieces: bytes) -> Path:
    folder = tmp_path / "llama"
    settings(folder, tokenizer_class="LlamaTokenizer", add_bos_token=True, chat_template="{{ bos_token }}")
    (folder / "tokenizer.model").write_bytes(pieces)
    return folder


def rank_lines() -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(RANKS))


def plain(shift: int = 0) -> Callable[[str], list[int]]:
    """Returns what encodes a text by ``RANKS``, with ids from ``shift`` on."""
    own = tiktoken.Encoding(
        "own", pat_str=PATTERN, mergeable_ranks={t: i for i, t in enumerate(RANKS)}, special_tokens={}
    )
    return lambda text: [shift + token for token in own.encode(text)]


def test_a_model_of_sentencepiece(llama: Path, pieces: bytes, tmp_path: Path) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    tokenizer = load_tokenizer(llama, tmp_path)
    # transformers puts no further space before a Llama's text that begins with one.
    for text in (each for each in TEXTS if not each.startswith(" ")):
        ids = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text, add_special_tokens=True) == [reference.bos_id(), *ids]
    assert tokenizer.chat_template == "{{ bos_token }}"
    assert load_vocabulary(llama, [2], tmp_path).vocab_size >= reference.vocab_size()


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model"])
def test_ranks_of_tiktoken(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "ranks"
    settings(folder, tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>", extra_special_tokens=["<|end|>"])
    (folder / name).write_bytes(rank_lines())
    tokenizer, wanted = load_tokenizer(folder, tmp_path), plain()
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == wanted(text)
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [len(RANKS)]


def test_ranks_of_mistral(tmp_path: Path) -> None:
    folder = tmp_path / "mistral"
    settings(folder)
    specials = ["<unk>", "<s>", "</s>", "[INST]"]
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(RANKS),
            "default_vocab_size": len(RANKS) + 10,
            "default_num_special_tokens": 10,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(RANKS)
        ],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(specials)],
    }
    (folder / "tekken.json").write_text(json.dumps(content))
    tokenizer, wanted = load_tokenizer(folder, tmp_path), plain(10)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == wanted(text)
        assert tokenizer.encode(text, add_special_tokens=True) == [1, *wanted(text)]
    assert tokenizer.encode("[INST]", add_special_tokens=False) == [3]


def test_a_package_that_is_missing_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else found(name))
    with pytest.raises(ModelError, match=r"read with the package sentencepiece.*pip install 'pdserve\[tokenizers\]'"):
        read_tokenizer(llama)


def test_code_that_comes_with_a_model_is_not_run(llama: Path) -> None:
    (llama / "tokenization_own.py").write_text("raise SystemExit('it was run')")
    config = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    (llama / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (llama / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        read_tokenizer(llama)


def test_a_folder_without_one(tmp_path: Path) -> None:
    settings(tmp_path / "none")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, nor tekken\.json, .* or tiktoken\.model"):
        read_tokenizer(tmp_path / "none")
