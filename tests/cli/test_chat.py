"""``pdserve chat`` in a terminal of its own and in a pipe, at a server that answers as the tests have written it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.cli.chat.terminal import finished_blocks
from tests.cli.in_process import call
from tests.cli.scripted_server import (
    DONE,
    USAGE,
    Answer,
    ScriptedServer,
    UntilGone,
    delta,
    models,
    scripted,
    whole,
)
from tests.cli.terminal import Terminal, pdserve_in_terminal
from tests.processes import clean_environ

pytestmark = pytest.mark.integration

KEY = "a-key-for-tests-only-0123456789"
PROMPT = ">>> "


@contextmanager
def chat(server: ScriptedServer, folder: Path, *flags: str) -> Iterator[Terminal]:
    with pdserve_in_terminal("chat", server.url, *flags, XDG_STATE_HOME=str(folder)) as terminal:
        terminal.until(PROMPT)
        yield terminal


def ask(terminal: Terminal, text: str) -> str:
    """Returns what is shown between the line ``text`` and the next prompt."""
    terminal.line(text)
    return terminal.until(PROMPT).partition("\n")[2].removesuffix(PROMPT)


def pipe(text: str, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return call("chat", *argv, text=text, **environ)


FLAGS = ("--system", "Be brief.", "--temperature", "0", "--markdown", "off")


def test_a_conversation_with_every_command(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the sky is green\n")
    answers = [whole(f"answer {number}") for number in range(6)]
    with scripted(*answers) as server, chat(server, tmp_path, *FLAGS) as one:
        shown = ask(one, "One?")
        assert "answer 0\nTTFT " in shown and "5 prompt + 2 answer tokens" in shown
        ask(one, "Two?")
        ask(one, "/regen")
        assert "notes.txt goes with the next message, 17 bytes" in ask(one, f"/read {tmp_path}/notes.txt")
        ask(one, "/system Be long.")
        ask(one, "Three?")
        assert "the conversation is forgotten" in ask(one, "/reset")
        assert "no system prompt" in ask(one, "/system -")
        ask(one, "Four?")
        assert "there is no command /rset; did you mean /reset?" in ask(one, "/rset")
        assert "/read FILE" in ask(one, "/help")
        ask(one, "/usr/bin is what?")
        one.line("/quit")
        assert one.wait() == 0
    brief, long = ("system", "Be brief."), ("system", "Be long.")
    turns = [("user", "One?"), ("assistant", "answer 0"), ("user", "Two?"), ("assistant", "answer 2")]
    assert server.questions[:3] == [[brief, turns[0]], [brief, *turns[:3]], [brief, *turns[:3]]]
    assert server.questions[3] == [long, *turns, ("user", "notes.txt:\n\n```\nthe sky is green\n```\n\nThree?")]
    assert server.questions[4] == [("user", "Four?")]
    assert server.questions[5][-1] == ("user", "/usr/bin is what?")
    assert all((body["model"], body["temperature"], body["stream"]) == ("m", 0, True) for body in server.asked)


def test_ctrl_c_ends_the_answer_and_its_request_and_not_the_chat(tmp_path: Path) -> None:
    with scripted(Answer([delta("Well"), UntilGone()]), whole("again")) as server, chat(server, tmp_path) as one:
        before = one.mode()
        one.line("Why?")
        one.until("Well")
        one.press_ctrl_c()
        assert "stopped by you" in one.until(PROMPT)
        assert server.client_gone.wait(60)
        assert one.mode() == before
        assert "again" in ask(one, "And?")
        # What there was of the answer is a part of the conversation.
        assert server.questions[1] == [("user", "Why?"), ("assistant", "Well"), ("user", "And?")]


def test_ctrl_c_drops_what_is_typed_and_ends_the_chat_where_nothing_is(tmp_path: Path) -> None:
    with scripted() as server, chat(server, tmp_path) as one:
        one.type("half a mess")
        one.until("half a mess")
        one.press_ctrl_c()
        one.until(PROMPT)
        one.press_ctrl_c()
        assert one.wait() == 0
        assert "Traceback" not in one.rest()
    assert server.asked == []


def test_ctrl_d_ends_the_chat_and_its_lines_are_there_in_the_next_one(tmp_path: Path) -> None:
    with scripted(whole("a"), whole("b")) as server:
        with chat(server, tmp_path) as one:
            ask(one, "Do you know me?")
            one.press_ctrl_d()
            assert one.wait() == 0
        history = tmp_path / "pdserve" / "chat-history"
        assert history.stat().st_mode & 0o777 == 0o600
        with chat(server, tmp_path) as one:
            one.type("\x1b[A")
            one.until("Do you know me?")
            one.line("")
            one.until("b")
    assert [question[-1][1] for question in server.questions] == ["Do you know me?"] * 2


def test_sigterm_ends_it_and_gives_the_terminal_back(tmp_path: Path) -> None:
    with scripted(Answer([delta("Well"), UntilGone()])) as server, chat(server, tmp_path) as one:
        before = one.mode()
        one.line("Why?")
        one.until("Well")
        one.process.terminate()
        assert one.wait() == 128 + 15
        assert server.client_gone.wait(60)
        assert one.mode() | before == one.mode()
        assert "Traceback" not in one.rest()


def test_a_message_of_several_lines_is_one_message(tmp_path: Path) -> None:
    with scripted(whole("a"), whole("b")) as server, chat(server, tmp_path) as one:
        one.line('"""one')
        one.until("... ")
        one.line("two")
        one.until("... ")
        one.line('three"""')
        one.until("TTFT")
        one.until(PROMPT)
        # What is pasted comes at once.
        one.type("x = 1\rprint(x)\r")
        one.until("TTFT")
    assert [question[-1][1] for question in server.questions] == ["one\ntwo\nthree", "x = 1\nprint(x)"]


MARKDOWN = ("# Tit", "le\n\nSome **bo", "ld** text\n\n- one\n- t", "wo\n\n```py\nx = 1\n`", "``\n\nEnd.")


def test_markdown_is_rendered_or_left_as_it_is(tmp_path: Path) -> None:
    with scripted(whole(*MARKDOWN), whole(*MARKDOWN)) as server, chat(server, tmp_path) as one:
        rendered = ask(one, "Why?")
        assert "**" not in rendered and "```" not in rendered and "# Title" not in rendered
        for words in ("Title", "Some bold text", " • one", " • two", " x = 1", "End."):
            assert words in rendered
        ask(one, "/markdown off")
        assert "".join(MARKDOWN) in ask(one, "Why?")


def test_an_answer_longer_than_the_terminal_is_shown_once(tmp_path: Path) -> None:
    code = [f"line {number}\n" for number in range(80)]
    with scripted(whole("```\n", *code, "```\n\nEnd.")) as server, chat(server, tmp_path) as one:
        shown = ask(one, "Why?")
    # Before the block had ended, its last rows alone were drawn, and were taken away.
    assert all(f"line {number} " in shown or f"line {number}\n" in shown for number in range(80))
    final = shown[shown.rindex("line 0 ") :]
    assert [line.strip() for line in final.splitlines() if line.strip().startswith("line")] == [
        line.strip() for line in code
    ]


def test_reasoning_is_dim_and_not_a_part_of_the_conversation(tmp_path: Path) -> None:
    parts = [delta(reasoning_content="Hm"), delta(reasoning="m."), delta("Yes."), delta(finish="stop"), USAGE, DONE]
    with scripted(Answer(parts), whole("b")) as server, chat(server, tmp_path, "--markdown", "off") as one:
        assert "Hmm.\n\nYes." in ask(one, "Why?")
        assert "\x1b[2mHm\x1b[0m" in one.shown
        ask(one, "And?")
    assert server.questions[1][1] == ("assistant", "Yes.")


@pytest.mark.parametrize("markdown", ["on", "off"])
def test_a_model_cannot_change_the_terminal(tmp_path: Path, markdown: str) -> None:
    """Renderers of Markdown show the addresses of links decoded."""
    link = "<http://a/%1b]52;c;cm0%07%1b[2J%c2%9b2J>"
    answers = (whole("a\x1b[2Jb\x07\x9b2Jc"), whole(link))
    with scripted(*answers) as server, chat(server, tmp_path, "--markdown", markdown) as one:
        assert "a[2Jb2Jc" in ask(one, "Why?")
        assert "http://a/" in ask(one, "And?")
        assert "\x1b]52" not in one.shown
        assert "\x1b[2J" not in one.shown and "\x9b" not in one.shown and "\x07" not in one.shown


FAULTS = [
    (Answer([b'{"error": {"message": "no room"}}'], 503), "answers with status 503: no room"),
    (Answer([b"<html>busy</html>"], 502), "answers with status 502: <html>busy</html>"),
    (Answer([delta("Be"), b'data: {"error": {"message": "it died"}}\n\n']), "the answer broke off: it died"),
    (Answer([delta("Be")]), "the answer broke off: the stream ended without [DONE]"),
    (Answer([delta("Be"), DONE]), "the answer broke off: the server gave no reason for its end"),
    (Answer([b"data: nonsense\n\n"]), "the answer broke off: not a chunk of an answer"),
    (Answer([b'data: {"choices": 3}\n\n']), "the answer broke off: the server sent no chunk of an answer"),
    (Answer([b"data: " + b"x" * 2**22 + b"\n\n"]), "the answer broke off: the server sent a line longer than 1 MiB"),
    (Answer([delta("Be")], headers={"content-length": "1000"}), "the answer broke off: "),
]


def test_what_goes_wrong_is_one_sentence_and_the_chat_goes_on(tmp_path: Path) -> None:
    with (
        scripted(*(answer for answer, _ in FAULTS), whole("fine")) as server,
        chat(server, tmp_path, "--markdown", "off") as one,
    ):
        for _, said in FAULTS:
            ask(one, "/reset")
            shown = " ".join(ask(one, "Why?").split())
            assert said in shown
            assert "Traceback" not in shown
        assert "fine" in ask(one, "/regen")


@pytest.mark.parametrize(("answer", "said"), FAULTS)
def test_in_a_pipe_what_goes_wrong_is_status_1(answer: Answer, said: str) -> None:
    with scripted(answer) as server:
        done = pipe("Why?", server.url)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout in ("", "Be\n")


def test_in_a_pipe_one_message_is_answered() -> None:
    parts = [delta(reasoning_content="Hm"), delta("Yes. "), delta("**No**.\n"), delta(finish="stop"), USAGE, DONE]
    with scripted(Answer(parts), whole("b"), whole("c")) as server:
        done = pipe("  Why?\nHow?\n", server.url + "/v1/", "--max-tokens", "9")
        assert (done.returncode, done.stdout) == (0, "Yes. **No**.\n")
        assert done.stderr.startswith("TTFT ")
        assert pipe("not read", server.url, "What?").stdout == "b\n"
        assert pipe("not read", server.url, "--ask", "Who?").stdout == "c\n"
    assert [question[-1][1] for question in server.questions] == ["Why?\nHow?", "What?", "Who?"]
    assert [body.get("max_tokens") for body in server.asked] == [9, None, None]


def test_an_answer_that_nobody_reads_any_more_leaves_no_traceback() -> None:
    with scripted(whole(*["word " * 100] * 2000)) as server:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdserve", "chat", server.url, "--ask", "Why?"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environ(),
        )
        assert process.stdout is not None and process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait(60) == 1
        process.stderr.close()


def test_a_key_is_sent_where_one_is_given(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\nme {KEY}\n")
    with scripted(whole("a"), whole("b"), whole("c")) as server:
        assert pipe("Why?", server.url, "--api-key-file", str(keys)).returncode == 0
        assert pipe("Why?", server.url, PDSERVE_API_KEY="short").returncode == 0
        assert pipe("Why?", server.url).returncode == 0
    assert server.authorization == [*[f"Bearer {KEY}"] * 2, *["Bearer short"] * 2, "", ""]


@pytest.mark.parametrize(
    ("listed", "flags", "said"),
    [
        (models("a", "b"), ("--model", "c"), "has no model 'c'; it has a, b"),
        (models(), (), "serves no model now"),
        (b"<html>", (), "gives no list of models"),
    ],
)
def test_a_server_without_the_model_is_told(listed: object, flags: tuple[str, ...], said: str) -> None:
    with scripted(listed=listed) as server:
        done = pipe("Why?", server.url, *flags)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_server_cannot_change_the_terminal_with_its_errors() -> None:
    refusal = Answer([rb'{"error": {"message": "a\u001b]0;b\u0007c\u009b2J"}}'], 503)
    with scripted(refusal, listed=models("a\x1b[2J" + "b" * 2**19)) as server:
        for flags in (("--model", "c"), ()):
            said = pipe("Why?", server.url, *flags).stderr
            assert said.isascii()
            assert not {"\x1b", "\x07"} & set(said)
            assert len(said) < 2000


def test_the_model_that_is_named_is_asked() -> None:
    with scripted(whole("a"), listed=models("a", "b")) as server:
        assert pipe("Why?", server.url, "-m", "b").returncode == 0
    assert server.asked[0]["model"] == "b"


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (("http://127.0.0.1:1",), 1, "nobody answers at http://127.0.0.1:1: "),
        (("127.0.0.1:1",), 1, "nobody answers at http://127.0.0.1:1: "),
        (("http://",), 2, "--url: 'http://' was given"),
        (("http://127.0.0.1:1", "a", "b"), 2, "unexpected 'b'"),
        (("http://127.0.0.1:1", "--tempreature", "1"), 2, "did you mean --temperature?"),
    ],
)
def test_what_is_no_server_is_one_sentence(argv: tuple[str, ...], status: int, said: str) -> None:
    done = pipe("Why?", *argv)
    assert done.returncode == status
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_standard_input_without_a_message_is_told() -> None:
    done = pipe(" \n", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert "standard input is empty" in done.stderr


def test_blocks_of_markdown_are_finished_when_the_next_one_has_begun() -> None:
    text = "".join(MARKDOWN)
    assert finished_blocks("# Title\n\nSome") == ("", "# Title\n\nSome")
    assert finished_blocks("# Title\n\nSome\n") == ("# Title\n\n", "Some\n")
    assert finished_blocks("- one\n- two\n\n  more\n") == ("", "- one\n- two\n\n  more\n")
    whole_blocks, rest = finished_blocks(text + "\n")
    assert whole_blocks + rest == text + "\n"
    assert rest == "End.\n"
