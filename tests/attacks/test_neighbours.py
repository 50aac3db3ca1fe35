"""Tests that requests whose cost ``n`` or a list multiplies are paid by those who send them, and not by others.

What others notice is compared with what they notice of as many usual answers, in the same run.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import pairwise
from urllib.parse import urlsplit

import pytest

from pdserve.api.requests.tokenizer import MAX_CUT_CHARS
from tests.attacks.target import CONTEXT, PROMPT, Target
from tests.cluster.nodes import MODEL, Reply
from tests.eventually import eventually

NEIGHBOUR = "127.0.0.2"
"""Where there are no API keys, a client is an address. The attacker has another one."""
ANSWERS = 64
LONG_TEXTS = 16
MOST_TIMES_LONGER = 10
"""A gap may be so many times as long as beside usual answers. Without bounds it was more than a hundred times."""
AMBIGUOUS = " ".join(f"r{i}?" for i in range(600))
RULES = "\n".join(f'r{i}: "a" | "b" | "ab" | /[a-z]+/' for i in range(600))

TRIES = 3
"""Another program of a busy machine may make a gap, once. What a grammar does to a stream, it does each time."""

HOSTILE = {
    "a heavy grammar": f"start: {AMBIGUOUS}\n{RULES}\n",
    "a grammar that is heavy later": f"start: /[a-z]{{3}}/ {AMBIGUOUS}\n{RULES}\n",
}


def post(url: str, path: str, body: object, source: str = "127.0.0.1") -> Reply:
    """Sends a request from an address of this machine."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=120.0, source_address=(source, 0))
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return Reply(answer.status, dict(answer.headers), answer.read())
    finally:
        connection.close()


class Neighbour:
    """Streams of another client, one after the other, and how long their events come apart."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._over = threading.Event()
        self._arrivals: list[float] = []
        self._failures: list[str] = []
        self._thread = threading.Thread(target=self._run, name="neighbour")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        assert not self._failures, self._failures

    def gap_s(self, work: Callable[[], None]) -> float:
        """Returns the longest time without an event while ``work`` is done."""
        began = time.monotonic()
        work()
        ended = time.monotonic()
        inside = [at for at in self._arrivals if began <= at <= ended]
        times = [began, *inside, ended]
        return max(later - at for at, later in pairwise(times))

    def _run(self) -> None:
        while not self._over.is_set():
            connection = HTTPConnection(
                urlsplit(self._target.cluster.url).netloc, timeout=120.0, source_address=(NEIGHBOUR, 0)
            )
            body = self._target.ordinary(max_tokens=800, stream=True)
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            while not self._over.is_set() and (line := answer.readline()):
                if line.startswith(b"data:"):
                    self._arrivals.append(time.monotonic())
                if b'"error"' in line:
                    self._failures.append(line.decode())
            connection.close()


@contextmanager
def neighbour(target: Target) -> Iterator[Neighbour]:
    one = Neighbour(target)
    one.start()
    try:
        yield one
    finally:
        one.stop()


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_many_answers_by_a_heavy_grammar_keep_no_other_stream(attacked: Target, hostile: str) -> None:
    usual = {"model": MODEL, "prompt": PROMPT, "n": ANSWERS, "max_tokens": 16, "seed": 1}
    replies: list[Reply] = []

    def send(**more: object) -> None:
        replies.append(post(attacked.cluster.url, "/v1/completions", {**usual, **more}))

    with neighbour(attacked) as other:
        send()
        beside_usual = other.gap_s(lambda: send(seed=2))
        assert replies[-1].status == 200, replies[-1].body
        gaps_s: list[float] = []
        while not gaps_s or (min(gaps_s) > MOST_TIMES_LONGER * beside_usual and len(gaps_s) < TRIES):
            # A node compiles each of these once.
            grammar = f'{hostile}unused{len(gaps_s)}: "a"\n'
            gaps_s.append(other.gap_s(lambda: send(guided_grammar=grammar)))  # noqa: B023
    assert min(gaps_s) < MOST_TIMES_LONGER * beside_usual, gaps_s
    if replies[-1].status == 200:
        assert len(replies[-1].json()["choices"]) == ANSWERS
    else:
        assert replies[-1].status == 400, replies[-1].body
        assert "too much work" in replies[-1].json()["error"]["message"]
    attacked.check_answers()


def test_answers_by_a_heavy_grammar_are_the_same_each_time(attacked: Target) -> None:
    """The prefill node gives their first tokens, each as soon as the grammar has said which."""
    rules = " ".join(f"r{i}?" for i in range(180))
    before = attacked.remote_prefills()
    answers = []
    for _ in range(3):
        body = attacked.ordinary(n=4, max_tokens=3, temperature=1, seed=5, ignore_eos=False)
        reply = post(attacked.cluster.url, "/v1/completions", {**body, "guided_grammar": f"start: {rules}\n{RULES}\n"})
        assert reply.status == 200, reply.body
        answers.append([choice["token_ids"] for choice in reply.json()["choices"]])
    assert answers[0] == answers[1] == answers[2]
    # On a busy machine the decode node may compute some of them itself, with the same answer.
    eventually(lambda: attacked.remote_prefills() > before, "a prompt was prefilled remotely")


def test_many_long_texts_to_tokenise_keep_no_other_client(attacked: Target) -> None:
    long = {"model": MODEL, "prompt": "word " * (MAX_CUT_CHARS // 5)}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 28_000}]}
    url = attacked.cluster.url

    def took_s(path: str, body: object, source: str, status: int) -> float:
        began = time.monotonic()
        reply = post(url, path, body, source)
        assert reply.status == status, reply.body
        return time.monotonic() - began

    took_s("/tokenize", long, "127.0.0.1", 200)
    alone_s = took_s("/v1/chat/completions", chat, NEIGHBOUR, 400)
    with ThreadPoolExecutor(LONG_TEXTS) as pool:
        texts = [pool.submit(took_s, "/tokenize", long, "127.0.0.1", 200) for _ in range(LONG_TEXTS)]
        wait(texts, return_when=FIRST_COMPLETED)
        beside_s = took_s("/v1/chat/completions", chat, NEIGHBOUR, 400)
        assert not all(text.done() for text in texts), "they are still at work"
        slowest_s = max(text.result() for text in texts)
    assert beside_s < alone_s + slowest_s / 4, (alone_s, slowest_s, beside_s)


def test_a_text_to_tokenise_that_is_far_beyond_the_context_is_refused_at_once(attacked: Target) -> None:
    reply = post(attacked.cluster.url, "/tokenize", {"model": MODEL, "prompt": "word " * 200_000})
    assert (reply.status, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least" in reply.json()["error"]["message"]


def test_a_prompt_as_long_as_the_context_is_scored(attacked: Target) -> None:
    """It leaves no room for a token, and needs none."""
    body = {"model": MODEL, "prompt": [17] * CONTEXT, "max_tokens": 0, "echo": True, "logprobs": 0}
    reply = post(attacked.cluster.url, "/v1/completions", body)
    assert reply.status == 200, reply.body
    assert len(reply.json()["choices"][0]["logprobs"]["token_logprobs"]) == CONTEXT
