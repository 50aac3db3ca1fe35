"""Tests ``pdserve bench load``, as a process where it measures, against a server whose answers the test decides."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.report import Report, Row, read_report
from pdserve.process import free_port
from tests.bench.openai_server import OpenAiServer
from tests.cli.in_process import call
from tests.processes import clean_environ, pdserve

LIMIT_S = 120.0


async def bench(server: OpenAiServer, *argv: str) -> tuple[int, str]:
    """Returns the exit status and the output of the benchmark on ``server``."""

    def work() -> tuple[int, str]:
        with pdserve("bench", "load", "--url", server.url, *argv) as process:
            return process.wait(LIMIT_S), process.output

    async def on_thread() -> tuple[int, str]:
        return await asyncio.to_thread(work)

    found: tuple[int, str] = await server.serve(on_thread, LIMIT_S)
    return found


def lines_file(folder: Path, lines: Sequence[dict[str, Any]]) -> str:
    file = folder / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def load_row(report: Report) -> Row:
    (row,) = report.rows_of("load")
    return row


async def test_a_rate_of_random_prompts_is_reported_with_goodput_and_lateness(tmp_path: Path) -> None:
    server, file = OpenAiServer(), tmp_path / "report.json"
    status, output = await bench(
        server,
        *("--request-rate", "200", "--burstiness", "2", "--requests", "20", "--prompt-tokens", "8"),
        *("--output-tokens", "4", "--target-ttft-ms", "60000", "--target-itl-ms", "60000"),
        *("--api-key", "secret-key-of-the-test", "--json", str(file)),
    )
    assert status == 0, output
    report = read_report(file)
    row = load_row(report)
    assert row.at == {"rate": "200/s", "requests": 20}
    assert (row.figure("failed").value, row.figure("good").value) == (0, 100)
    assert row.figure("goodput").value == row.figure("requests").value > 0
    assert 0 <= row.figure("sent late p50").value <= row.figure("sent late at most").value
    assert row.figure("client CPU").value > 0
    percentiles = {each.at["of"]: each for each in report.rows_of("latencies")}
    assert list(percentiles) == ["TTFT", "ITL", "TPOT", "E2E"]
    for each in percentiles.values():
        assert each.figure("p50").value <= each.figure("p90").value <= each.figure("p99").value
    assert "20 of 20 answered, 0 failed, 0 running" in output
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret-key-of-the-test"}
    assert "secret-key-of-the-test" not in output + file.read_text()


async def test_a_target_that_no_answer_can_meet_gives_no_goodput(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    status, output = await bench(OpenAiServer(gathers=1), "--requests", "4", "--target-itl-ms", "0.000001")
    assert status == 0, output
    status, output = await bench(
        OpenAiServer(), *("--requests", "4", "--target-ttft-ms", "0.000001", "--json", str(file))
    )
    assert status == 0, output
    assert load_row(read_report(file)).figure("goodput").value == 0


async def test_each_turn_waits_for_the_answer_and_has_it_in_its_messages(tmp_path: Path) -> None:
    said = [("human", "a"), ("gpt", "ignored"), ("human", "b"), ("human", "c")]
    conversations = [{"conversations": [{"from": who, "value": f"{text}{i}"} for who, text in said]} for i in range(3)]
    server = OpenAiServer()
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(conversations))
    status, output = await bench(
        server, *("--dataset", str(file), "--concurrency", "3", "--output-tokens", "2", "--warm-up", "0")
    )
    assert status == 0, output
    assert "sharegpt.json: 9 requests in 3 sessions" in output
    assert len(server.bodies) == 9
    assert server.most <= 3
    assert all("ignore_eos" not in body for body in server.bodies)
    last = {body["messages"][0]["content"]: body["messages"] for body in server.bodies}
    assert [message["content"] for message in last["a1"]] == ["a1", "w0w1", "b1", "w0w1", "c1"]


async def test_a_trace_is_sent_at_its_times_and_may_be_faster(tmp_path: Path) -> None:
    trace = [
        {"timestamp": 1000 * i, "input_length": 20, "output_length": 3, "hash_ids": [0, i], "session_id": i % 2}
        for i in range(6)
    ]
    server, report = OpenAiServer(), tmp_path / "report.json"
    flags = ("--dataset", lines_file(tmp_path, trace), "--dataset-block-tokens", "16", "--dataset-speed", "10")
    status, output = await bench(server, *flags, "--warm-up", "0", "--json", str(report))
    assert status == 0, output
    prompts = [body["prompt"] for body in server.bodies]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 6
    row = load_row(read_report(report))
    assert row.at == {"speed": "10", "requests": 6}
    # The first and the last request are 5 s apart in the trace, so 0.5 s here; without times it takes some 20 ms.
    assert row.figure("requests").value <= 2 * 6 / 0.5


async def test_failed_requests_are_counted_by_reason_and_the_turns_after_them_are_not_sent(tmp_path: Path) -> None:
    turns = [{"turns": [{"text": "a"}, {"text": "b"}, {"text": "c"}]} for _ in range(2)]
    report = tmp_path / "report.json"
    server = OpenAiServer(fails_after=4)
    flags = ("--dataset", lines_file(tmp_path, turns), "--output-tokens", "2", "--warm-up", "0")
    status, output = await bench(server, *flags, "--json", str(report))
    assert status == 0, output
    row = load_row(read_report(report))
    assert (row.figure("failed").value, row.figure("not sent").value) == (1, 1)
    (reason,) = read_report(report).rows_of("failed requests")
    assert (reason.at["reason"], reason.figure("failed").value) == ("status 503", 1)
    assert "1 turns were not sent" in output
    assert "4 of 6 answered, 1 failed" in output


def test_a_dead_port_is_one_sentence() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for more in ((), ("--served-model-name", "m", "--requests", "100000")):
        done = call("bench", "load", "--url", url, *more)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"pdserve bench: nothing answers at {url}: Connection refused\n"


def test_a_wrong_line_is_one_sentence_and_nothing_is_sent(tmp_path: Path) -> None:
    file = lines_file(tmp_path, [{"prompt": "a"}, {"promt": "b"}])
    done = call("bench", "load", "--url", f"http://127.0.0.1:{free_port()}", "--dataset", file)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "requests.jsonl, line 2: it has none of prompt, messages" in line


async def test_a_plan_that_cannot_be_carried_out_is_refused(tmp_path: Path) -> None:
    file = lines_file(tmp_path, [{"prompt": "a"}] * 3)
    for flags, message in (
        (("--dataset", file, "--concurrency", "1,2"), "has 3 requests or conversations; 6 are needed, since each load"),
        (("--request-rate", "1", "--run-timeout-s", "20"), "requests are sent for 30 s, and --run-timeout-s allows 20"),
    ):
        status, output = await bench(OpenAiServer(), *flags)
        assert status == 1
        assert message in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--burstiness", "0.5"), "--burstiness needs --request-rate"),
        (("--request-rate", "1", "--concurrency", "4"), "--request-rate and --concurrency exclude each other"),
        (("--model", "m"), "asks for the model of --served-model-name"),
    ],
)
def test_a_flag_that_would_have_no_effect_is_refused(flags: tuple[str, ...], message: str) -> None:
    done = call("bench", "load", "--url", f"http://127.0.0.1:{free_port()}", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line


async def test_a_warm_up_that_fails_shows_the_servers_words() -> None:
    status, output = await bench(OpenAiServer(fails_after=0))
    assert status == 1
    assert "a request of the warm-up failed at http://127.0.0.1:" in output


async def test_a_terminal_has_one_line_that_changes() -> None:
    server = OpenAiServer()

    def work() -> str:
        terminal, theirs = pty.openpty()
        argv = ["bench", "load", "--url", server.url, "--request-rate", "20", "--requests", "40"]
        command = [sys.executable, "-P", "-m", "pdserve", *argv, "--prompt-tokens", "4", "--output-tokens", "2"]
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=clean_environ()) as process:
            os.close(theirs)
            shown = b""
            # Reading fails when the program has ended, and the other side of the terminal is closed with it.
            with suppress(OSError):
                while part := os.read(terminal, 2**16):
                    shown += part
            os.close(terminal)
        assert process.returncode == 0, shown
        return shown.decode()

    async def on_thread() -> str:
        return await asyncio.to_thread(work)

    shown = await server.serve(on_thread, LIMIT_S)
    lines = re.findall(r"\r\x1b\[2K[^\r]*answered[^\r]*", shown)
    assert len(lines) > 1
    assert any(" left" in line for line in lines)
    assert "40 of 40 answered" in lines[-1]
