"""Tests that prompts become the same tokens as in the reference implementation, though that is not loaded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pdserve.api.requests.chat_messages import plain_messages
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.errors import InvalidRequest, ModelError

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello there"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "漢字 <|im_end|> 👩‍👩‍👧\n"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]},
    ],
]


def render(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    given = {"add_generation_prompt": True, "continue_final_message": False, "created": 0, "template_kwargs": {}}
    return tokenizer.render_chat(plain_messages(messages), **{**given, **options})


@pytest.mark.parametrize("messages", CHATS)
def test_chat_tokens_are_those_of_auto_tokenizer(
    messages: list[dict[str, Any]], tokenizer: Tokenizer, model_dir: Path
) -> None:
    reference = AutoTokenizer.from_pretrained(model_dir)
    expected = reference.apply_chat_template(
        plain_messages(messages), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    text = render(tokenizer, messages)
    assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_final_message_can_be_continued(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}]
    text = render(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOne, two")


def test_stored_truncation_is_not_applied(model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "truncating")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    ids = load_tokenizer(folder).encode("one two three four five six seven", add_special_tokens=False)
    assert len(ids) > 4


def test_template_cannot_be_replaced(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as raised:
        render(tokenizer, CHATS[0], template_kwargs={"chat_template": "{{ messages }}"})
    assert raised.value.param == "chat_template_kwargs.chat_template"


def test_template_that_refuses(model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "strict")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render(load_tokenizer(folder), CHATS[0])


@pytest.mark.parametrize(
    ("kwargs", "param"), [({"count": "x"}, "chat_template_kwargs"), ({}, "messages")], ids=["kwargs", "none"]
)
def test_template_that_fails_shows_nothing_of_its_inside(
    kwargs: dict[str, Any], param: str, model_dir: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "failing")
    (folder / "chat_template.jinja").write_text("{{ count + 1 }}")
    with pytest.raises(InvalidRequest) as raised:
        render(load_tokenizer(folder), CHATS[0], template_kwargs=kwargs)
    assert raised.value.param == param
    assert raised.value.message.startswith("the model's chat template cannot render these messages")
    assert "undefined" not in raised.value.message
    assert "str" not in raised.value.message


def test_model_without_template(model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        render(load_tokenizer(folder), CHATS[0])


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_folder(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer"):
        load_tokenizer(tmp_path)


def test_a_template_that_asks_for_the_date_gets_that_of_the_request(model_dir: Path, tmp_path: Path) -> None:
    """Whenever and wherever it is rendered: another node may go on with the answer."""
    folder = shutil.copytree(model_dir, tmp_path / "dated")
    (folder / "chat_template.jinja").write_text(
        "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') ~ strftime_now( \"%H'%M\" ) }}{% endif %}"
        '{%- set at = strftime_now("%S") %}/{{ at }}/{{ kind }}'
    )
    given = {"kind": "{x}", "pdserve_dates": 1}
    text = render(load_tokenizer(folder), CHATS[0], created=1_700_000_000, template_kwargs=given)
    assert re.fullmatch(r"2023-11-14\d\d'\d\d/20/\{x\}", text), "a format that is no plain literal gets the node's time"


@pytest.mark.integration
def test_api_process_never_imports_torch(model_dir: Path) -> None:
    program = (
        "import sys, pathlib, pdserve.api.node.server, pdserve.api.requests.tokenizer as t\n"
        "k = t.load_tokenizer(pathlib.Path(sys.argv[1]))\n"
        "k.render_chat([{'role': 'user', 'content': 'x'}], add_generation_prompt=True,\n"
        "              continue_final_message=False, created=0, template_kwargs={})\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(model_dir)], check=True, timeout=60)
