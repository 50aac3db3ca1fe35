"""Tests that a GGUF file's tokeniser equals the tokeniser of the folder that the file was made from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel

from pdserve.api.requests.tokenizer import load_tokenizer
from pdserve.errors import ModelError
from pdserve.models.checkpoint.cached_tokenizer import gguf_tokenizer
from pdserve.models.checkpoint.model_files import packaged_gguf
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model

TEXTS = ["Hello", "  The  capital of France, isn't it? 12345\n\n\tété 漢字 🙂", "<|im_start|>user\nhi<|im_end|>", ""]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_tokens_and_chat_template_are_those_of_the_converted_folder(demo_model: Path) -> None:
    gguf, folder = load_tokenizer(packaged_gguf()), load_tokenizer(demo_model)
    for text in TEXTS:
        for special in (False, True):
            ids = gguf.encode(text, add_special_tokens=special)
            assert ids == folder.encode(text, add_special_tokens=special)
        for skip in (False, True):
            assert gguf.decode(ids, skip_special_tokens=skip) == folder.decode(ids, skip_special_tokens=skip)
    rendered = [
        tokenizer.render_chat(
            MESSAGES, add_generation_prompt=True, continue_final_message=False, created=0, template_kwargs={}
        )
        for tokenizer in (gguf, folder)
    ]
    assert rendered[0] == rendered[1]
    assert "<|im_start|>assistant" in rendered[0]


@pytest.mark.integration
def test_it_needs_no_torch() -> None:
    script = (
        "import sys; from pathlib import Path; from pdserve.api.requests.tokenizer import load_tokenizer;"
        f"load_tokenizer(Path({str(packaged_gguf())!r})); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = save_tiny_gguf(save_tiny_model("llama", tmp_path / "folder"), tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(path)


def save_tokenizer(path: Path, pre: str) -> Path:
    """Saves a tokenizer of bytes, with ``12`` and ``123`` as the only longer tokens."""
    writer = GGUFWriter(path, "glm4")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "12", "123"])
    writer.add_token_merges(["1 2", "12 3"])
    writer.add_token_types([TokenType.NORMAL] * 258)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("glm4", ["123", "12"]), ("stablelm2", ["1", "2", "3", "1", "2"]), ("gpt-2", ["123", "12"])],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = gguf_tokenizer(save_tokenizer(tmp_path / "tiny.gguf", pre))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12312", add_special_tokens=False)) == pieces


@pytest.mark.parametrize("pre", ["strange", "starcoder"])
def test_splits_that_are_not_known_are_refused(tmp_path: Path, pre: str) -> None:
    """As are splits that put digits apart, if a merge of the file puts some together."""
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.pre '{pre}' of .*tiny\.gguf, how text is split"):
        gguf_tokenizer(save_tokenizer(tmp_path / "tiny.gguf", pre))
