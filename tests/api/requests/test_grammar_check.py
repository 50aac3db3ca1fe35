"""Tests the check of grammars with real processes: one that compiles, and some that hang, die or never start."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.api.requests.grammar_check import (
    MAX_OF_CLIENT,
    MAX_PARTS_TRIED,
    MAX_WAITING,
    GrammarCheck,
    GrammarPart,
    WantedGrammar,
)
from pdserve.config import GrammarConfig
from pdserve.errors import DeadlineExceeded, InvalidRequest, TooManyRequests, Unavailable
from pdserve.wire.sampling_params import Grammar, GrammarKind, GrammarTrial
from tests.tiny_vocabulary import save_tiny_tokenizer

pytestmark = pytest.mark.integration

ANSWERS = """
import json, os, signal, sys, time
for line in sys.stdin:
    trial = json.loads(line)
    text = trial["grammar"]["text"]
    with open(sys.argv[1], "a") as asked:
        print(text, file=asked)
    if text == "pid":
        with open(sys.argv[1] + ".pid", "w") as told:
            told.write(str(os.getpid()))
    if text == "hang":
        time.sleep(600)
    if text == "be killed" or (text == "be killed once" and not os.path.exists(sys.argv[1] + ".killed")):
        open(sys.argv[1] + ".killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "die":
        os.abort()
    refusal = "it is bad" if text in ("bad", "worse") else ""
    print(json.dumps({"grammar": trial["grammar"], "refusal": refusal}), flush=True)
"""

AT_FAULT = "the schema of 'g' cannot be followed at 'properties.a': "
KILLED_ONCE = """
import os, signal, sys
if not os.path.exists(sys.argv[1] + ".started"):
    open(sys.argv[1] + ".started", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def wanted(text: str) -> WantedGrammar:
    return WantedGrammar(GrammarTrial(Grammar(GrammarKind.REGEX, text)), "guided_regex")


@asynccontextmanager
async def checking(
    folder: Path, command: Callable[[Path], tuple[str, ...]] | None = None, **settings: float
) -> AsyncIterator[GrammarCheck]:
    config = GrammarConfig(**settings)  # type: ignore[arg-type]
    check = GrammarCheck(folder, config) if command is None else GrammarCheck(folder, config, command)
    try:
        yield check
    finally:
        check.close()


def scripted(folder: Path) -> tuple[str, ...]:
    return (sys.executable, "-c", ANSWERS, str(folder / "asked"))


def asked(folder: Path) -> list[str]:
    """Returns what the processes were asked, without the question at each one's start."""
    return [text for text in (folder / "asked").read_text().split() if text != "a"]


async def refusal(check: GrammarCheck, text: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        await check.compiled(wanted(text), 30.0)
    return refused.value


async def test_a_grammar_is_tried_in_a_process_beside(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    async with checking(tmp_path) as check:
        good = wanted("[ab]+")
        before = check.process_id
        assert await check.compiled(good, 30.0) == good.trial.grammar
        assert before is None, "it is started when it is wanted"
        assert check.process_id not in (None, os.getpid())
        bad = await refusal(check, "(ab")
    assert (bad.param, bad.code) == ("guided_regex", "invalid_grammar")
    assert "unclosed group" in bad.message


async def test_of_a_grammar_that_the_node_has_made_the_part_at_fault_is_named(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    good, bad = ('{"properties": {"a": ' + schema + "}}" for schema in ('{"type": "null"}', '{"pattern": "(?=a)"}'))
    parts = [
        GrammarPart(f"the schema of {name!r}", Grammar(GrammarKind.JSON_SCHEMA, text))
        for name, text in (("f", good), ("g", bad))
    ]
    async with checking(tmp_path) as check:
        for known, named in ((parts, AT_FAULT), (parts[:1], "'tools'")):
            text = f"start: a b\na: %json {good}\nb: %json {bad}\n"
            wanted = WantedGrammar(GrammarTrial(Grammar(GrammarKind.LARK, text)), "tools", known.copy)
            with pytest.raises(InvalidRequest) as refused:
                await check.compiled(wanted, 60.0)
            assert refused.value.message.startswith(named)
            assert "look-ahead" in refused.value.message
            assert "%json" not in refused.value.message
            assert (refused.value.param, refused.value.code) == ("tools", "invalid_grammar")


def of_parts(whole: str, parts: list[str]) -> WantedGrammar:
    made = [GrammarPart(repr(text), Grammar(GrammarKind.REGEX, text)) for text in parts]
    return WantedGrammar(GrammarTrial(Grammar(GrammarKind.REGEX, whole)), "tools", lambda: made)


async def test_why_a_grammar_is_refused_is_looked_for_once_and_takes_no_other_s_place(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted, cached=2) as check:
        await check.compiled(wanted("x"), 30.0)
        parts = [f"p{number}" for number in range(4)]
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="'worse' cannot be followed: it is bad"):
                await check.compiled(of_parts("bad", [*parts, "worse", "p9"]), 60.0)
        await check.compiled(wanted("x"), 30.0)
        assert asked(tmp_path) == ["x", "bad", *parts, "worse"]
        # Nothing is at fault by itself among so many.
        many = [f"q{number}" for number in range(MAX_PARTS_TRIED)]
        with pytest.raises(InvalidRequest, match="'tools' cannot be followed: it is bad"):
            await check.compiled(of_parts("worse", [*many, "bad"]), 120.0)
        assert asked(tmp_path)[7:] == ["worse", *many]


async def test_a_refusal_stays_one_when_its_reason_cannot_be_looked_for(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted, compile_s=2.0) as check:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="'tools' cannot be followed: it is bad"):
                await check.compiled(of_parts("bad", ["x", "hang", "worse"]), 60.0)
        with pytest.raises(InvalidRequest, match="'tools' cannot be followed: it is bad"):
            await check.compiled(of_parts("bad", ["hang"]), 0.5)
    assert asked(tmp_path).count("bad") == 1


async def test_outcomes_are_kept_by_content(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted, cached=2) as check:
        for text in ("x", "x", "y", "x", "z", "x", "y"):
            await check.compiled(wanted(text), 30.0)
        assert asked(tmp_path) == ["x", "y", "z", "y"]
        assert str(await refusal(check, "bad")) == str(await refusal(check, "bad"))
        assert asked(tmp_path)[4:] == ["bad"]


async def test_a_grammar_that_takes_too_long_or_kills_its_process_harms_no_other(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted, compile_s=2.0) as check:
        assert "takes longer than 2 s" in (await refusal(check, "hang")).message
        assert await check.compiled(wanted("x"), 30.0)
        assert "more memory, or deeper nesting" in (await refusal(check, "die")).message
        assert "more memory, or deeper nesting" in (await refusal(check, "die")).message
        assert await check.compiled(wanted("y"), 30.0)
    assert asked(tmp_path) == ["hang", "x", "die", "y"]


async def test_a_grammar_whose_process_somebody_kills_is_tried_once_more(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted) as check:
        assert await check.compiled(wanted("be killed once"), 60.0)
        assert "more memory, or deeper nesting" in (await refusal(check, "be killed")).message
        assert await check.compiled(wanted("x"), 60.0)


async def test_a_process_that_is_killed_at_its_start_is_started_once_more(tmp_path: Path) -> None:
    async with checking(
        tmp_path, lambda folder: (sys.executable, "-c", KILLED_ONCE + ANSWERS, str(folder / "asked"))
    ) as check:
        assert await check.compiled(wanted("x"), 60.0)
    async with checking(tmp_path, lambda _: (sys.executable, "-c", "import os; os.abort()")) as check:
        with pytest.raises(Unavailable, match="cannot be compiled on this node"):
            await check.compiled(wanted("x"), 60.0)


async def test_a_process_that_does_not_start_leaves_the_node_without_grammars(tmp_path: Path) -> None:
    async with checking(tmp_path, lambda _: (sys.executable, "-c", "")) as check:
        with pytest.raises(Unavailable, match="cannot be compiled on this node"):
            await check.compiled(wanted("x"), 30.0)


async def test_a_request_waits_no_longer_than_its_deadline(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted, compile_s=1.0) as check:
        with pytest.raises(DeadlineExceeded):
            await check.compiled(wanted("hang"), 0.01)


async def test_requests_with_the_same_new_grammar_wait_for_one_trial(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted) as check:
        many = [check.compiled(wanted("x"), 30.0, b"%d" % number) for number in range(MAX_WAITING + 1)]
        assert len(set(await asyncio.gather(*many))) == 1
    assert asked(tmp_path) == ["x"]


async def test_more_new_grammars_than_may_wait_are_refused(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted) as check:
        outcomes = await asyncio.gather(
            *(
                check.compiled(wanted(f"x{number}"), 30.0, b"%d" % (number // MAX_OF_CLIENT))
                for number in range(MAX_WAITING + 1)
            ),
            return_exceptions=True,
        )
    assert [type(outcome) for outcome in outcomes] == [Grammar] * MAX_WAITING + [Unavailable]


async def test_a_client_with_many_new_grammars_keeps_no_other_waiting(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted) as check:
        many = [f"a{number}" for number in range(MAX_OF_CLIENT)]
        asking = [(text, b"a") for text in (*many, "one more")] + [(text, b"b") for text in ("b0", "a5", "b1")]
        outcomes = await asyncio.gather(
            *(check.compiled(wanted(text), 30.0, client) for text, client in asking), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes].count(Grammar) == len(asking) - 1
        assert isinstance(outcomes[len(many)], TooManyRequests)
    # The grammar that both have is tried in the first turn that comes to it.
    assert asked(tmp_path) == ["a0", "b0", "a1", "a5", "a2", "b1", "a3", "a4", *many[6:]]


async def test_nothing_is_tried_after_the_close(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted) as check:
        pass
    with pytest.raises(Unavailable):
        await check.compiled(wanted("x"), 30.0)


async def test_a_grammar_whose_last_request_has_left_is_tried_only_if_that_has_begun(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted, compile_s=2.0) as check:
        hanging = asyncio.create_task(check.compiled(wanted("hang"), 30.0))
        leaving = [asyncio.create_task(check.compiled(wanted(text), 30.0)) for text in ("x", "x", "y")]
        staying = asyncio.create_task(check.compiled(wanted("y"), 30.0))
        await asyncio.sleep(0)
        for request in (hanging, *leaving):
            request.cancel()
        await asyncio.wait([hanging, *leaving])
        assert await staying == wanted("y").trial.grammar
    assert asked(tmp_path) == ["hang", "y"]


async def test_closing_ends_a_process_at_work(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted, compile_s=60.0) as check:
        await check.compiled(wanted("pid"), 30.0)
        pidfd = os.pidfd_open(int((tmp_path / "asked.pid").read_text()))
        hanging = asyncio.create_task(check.compiled(wanted("hang"), 30.0))
        await asyncio.sleep(0)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert await asyncio.to_thread(poller.poll, 30_000)
    os.close(pidfd)
    await asyncio.wait([hanging])
    assert hanging.cancelled()


async def test_a_long_grammar_is_not_tried(tmp_path: Path) -> None:
    async with checking(tmp_path, scripted, max_bytes=256) as check:
        assert "257 bytes; at most 256" in (await refusal(check, "x" * 257)).message
