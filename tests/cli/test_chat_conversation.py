"""Tests which messages a conversation sends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pdserve.cli.chat.server import MAX_FILE_BYTES, ChatRefused, Conversation, Message


def texts(messages: list[Message]) -> list[str]:
    return [f"{one['role']}: {one['content']}" for one in messages]


def test_each_question_goes_with_all_before_it_and_the_system_prompt() -> None:
    talk = Conversation("Be brief.")
    assert texts(talk.ask("One?")) == ["system: Be brief.", "user: One?"]
    talk.answered("1")
    assert texts(talk.ask("Two?")) == ["system: Be brief.", "user: One?", "assistant: 1", "user: Two?"]
    talk.system = ""
    talk.answered("2")
    assert texts(talk.ask("Three?"))[0] == "user: One?"


def test_a_question_is_asked_again_in_the_place_of_its_answer() -> None:
    talk = Conversation()
    talk.ask("One?")
    talk.answered("1")
    talk.ask("Two?")
    talk.answered("2")
    assert texts(talk.ask_again()) == ["user: One?", "assistant: 1", "user: Two?"]
    talk.answered("two")
    assert texts(talk.ask_again()) == ["user: One?", "assistant: 1", "user: Two?"]


def test_a_question_without_an_answer_counts_as_not_asked_and_can_be_asked_again() -> None:
    talk = Conversation()
    talk.ask("Same?")
    talk.answered("1")
    talk.ask("Same?")
    talk.answered("")
    assert texts(talk.ask_again()) == ["user: Same?", "assistant: 1", "user: Same?"]
    talk.answered("")
    assert texts(talk.ask("Other?")) == ["user: Same?", "assistant: 1", "user: Other?"]


def test_nothing_is_left_after_a_reset_but_the_system_prompt(tmp_path: Path) -> None:
    talk = Conversation("Be brief.")
    talk.ask("One?")
    talk.answered("1")
    (tmp_path / "a").write_text("text")
    talk.read(str(tmp_path / "a"))
    talk.reset()
    with pytest.raises(ChatRefused, match="no question yet"):
        talk.ask_again()
    assert texts(talk.ask("Two?")) == ["system: Be brief.", "user: Two?"]


@pytest.mark.parametrize("name", ["~nobody-of-this-name/a", "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(ChatRefused, match="cannot read"):
        Conversation().read(name)


def test_a_file_of_nothing_but_backticks_is_read_at_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("`" * MAX_FILE_BYTES)
    talk = Conversation()
    began = time.monotonic()
    assert talk.read(str(tmp_path / "a")) == MAX_FILE_BYTES
    assert time.monotonic() - began < 5
    assert talk.ask("What?")[0]["content"].startswith("a:\n\n" + "`" * (MAX_FILE_BYTES + 1) + "\n")


def test_files_go_with_the_next_message_alone(tmp_path: Path) -> None:
    talk = Conversation()
    for name, text in (("a.py", "x = 1\n"), ("b.md", "```\nfenced\n```\n")):
        (tmp_path / name).write_text(text)
        assert talk.read(str(tmp_path / name)) == len(text)
    (question,) = talk.ask("What is this?")
    expected = "a.py:\n\n```\nx = 1\n```\n\nb.md:\n\n````\n```\nfenced\n```\n````\n\nWhat is this?"
    assert question["content"] == expected
    talk.answered("files")
    assert texts(talk.ask_again()) == [f"user: {expected}"]
    talk.answered("files")
    assert texts(talk.ask("And?"))[-1] == "user: And?"


def test_a_file_that_is_no_text_or_too_large_or_not_there_is_refused(tmp_path: Path) -> None:
    talk = Conversation()
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    (tmp_path / "large").write_text("é" * MAX_FILE_BYTES)
    for name, said in (("picture", "no text|not a text"), ("large", "larger than 1 MiB"), ("gone", "No such file")):
        with pytest.raises(ChatRefused, match=said):
            talk.read(str(tmp_path / name))
    with pytest.raises(ChatRefused, match="Is a directory"):
        talk.read(str(tmp_path))
    assert texts(talk.ask("Well?")) == ["user: Well?"]
