"""The requests of a soak: a fixed number of them by seed, each of which is asked for many times."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MODEL = "soak"
Body = dict[str, object]

_WORDS = ("river", "lantern", "quiet", "seven", "orchard", "copper", "window", "travel", "morning", "salt", "harbour")
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks a colour up.", "parameters": _SCHEMA},
}


@dataclass(frozen=True)
class Ask:
    """A request without what differs from one time to the next (its salt, its label)."""

    name: str
    path: str
    body: Mapping[str, object]

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def resumable(self) -> bool:
        """Whether another node goes on with an answer that has begun. One that it does not go on with begins again."""
        return "best_of" not in self.body


class _Source:
    """Draws prompts and parameters."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.dice = random.Random(f"soak {seed}")  # the requests must be repeatable, not secret
        self._vocabulary = vocabulary
        self._systems = [self.ids(self.dice.choice((96, 160, 250))) for _ in range(4)]

    def ids(self, count: int) -> list[int]:
        return self.dice.choices(range(300, self._vocabulary - 200), k=count)

    def prompt(self) -> list[int]:
        """Returns a prompt of its own, or one that begins as others do."""
        if self.dice.random() < 0.5:
            return self.dice.choice(self._systems) + self.ids(self.dice.randint(1, 60))
        return self.ids(self.dice.choice((3, 15, 16, 17, 40, 100, 220)))

    def words(self, count: int) -> str:
        return " ".join(self.dice.choices(_WORDS, k=count))

    def messages(self) -> list[dict[str, str]]:
        turns = [{"role": "system", "content": self.words(self.dice.choice((5, 40, 90)))}]
        for _ in range(self.dice.randint(0, 2)):
            turns += [{"role": "user", "content": self.words(12)}, {"role": "assistant", "content": self.words(20)}]
        return [*turns, {"role": "user", "content": self.words(self.dice.randint(3, 30))}]


def catalogue(seed: int, vocabulary: int, each: int) -> list[Ask]:
    """Returns ``each`` requests of every kind."""
    source = _Source(seed, vocabulary)
    return [make(f"{name}-{number}", source) for name, make in _KINDS.items() for number in range(each)]


def _completion(name: str, source: _Source, **fields: object) -> Ask:
    body: Body = {"prompt": source.prompt(), "max_tokens": source.dice.choice((4, 12, 24, 40)), "ignore_eos": True}
    body |= {"model": MODEL, "temperature": 0, "return_token_ids": True}
    return Ask(name, "/v1/completions", body | fields)


def _chat(name: str, source: _Source, **fields: object) -> Ask:
    body: Body = {"messages": source.messages(), "max_tokens": source.dice.choice((8, 20, 32)), "ignore_eos": True}
    return Ask(name, "/v1/chat/completions", body | {"model": MODEL, "temperature": 0} | fields)


def _stream() -> Body:
    return {"stream": True, "stream_options": {"include_usage": True}}


def _seeded(source: _Source) -> Body:
    return {"seed": source.dice.randrange(1 << 30), "temperature": 0.7, "top_k": 20}


def _repeating() -> Body:
    """Returns what makes an answer repeat itself, so that its next tokens can be guessed: it has two tokens only."""
    return {"allowed_token_ids": [400, 401], "max_tokens": 120}


_KINDS: Mapping[str, Callable[[str, _Source], Ask]] = {
    "stream": lambda name, source: _completion(name, source, **_stream()),
    "whole": lambda name, source: _completion(name, source),
    "seeded": lambda name, source: _completion(name, source, **_seeded(source), **_stream()),
    "choices": lambda name, source: _completion(name, source, **_seeded(source), n=2, stream=True),
    "whole-choices": lambda name, source: _completion(name, source, **_seeded(source), n=3),
    "best-of": lambda name, source: _completion(name, source, **_seeded(source), best_of=2, max_tokens=12),
    "long-answer": lambda name, source: _completion(name, source, **_stream(), max_tokens=160),
    "long-whole": lambda name, source: _completion(name, source, max_tokens=120),
    "long-prompt": lambda name, source: _completion(name, source, **_stream(), prompt=source.ids(620), max_tokens=12),
    "priority": lambda name, source: _completion(name, source, priority=source.dice.choice((-20, 20)), **_stream()),
    "echo": lambda name, source: _completion(name, source, echo=True, logprobs=2, prompt=source.ids(70)),
    "logprobs": lambda name, source: _completion(name, source, logprobs=3, **_stream()),
    "prompt-logprobs": lambda name, source: _completion(name, source, prompt_logprobs=1),
    "penalties": lambda name, source: _completion(
        name, source, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={"400": 2.0}, **_stream()
    ),
    "regex": lambda name, source: _completion(name, source, guided_regex="[a-z ]+", **_stream()),
    "chat": lambda name, source: _chat(name, source, **_stream()),
    "whole-chat": lambda name, source: _chat(name, source, logprobs=True, top_logprobs=2),
    "tools": lambda name, source: _chat(
        name, source, tools=[_TOOL], tool_choice="required", max_tokens=60, ignore_eos=False, **_stream()
    ),
    "schema": lambda name, source: _chat(
        name,
        source,
        response_format={"type": "json_schema", "json_schema": {"name": "seen", "schema": _SCHEMA, "strict": True}},
        max_tokens=60,
        ignore_eos=False,
    ),
    "responses": lambda name, source: Ask(
        name,
        "/v1/responses",
        {"model": MODEL, "input": source.words(25), "max_output_tokens": 20, "temperature": 0, "stream": True}
        | {"ignore_eos": True},
    ),
    "messages": lambda name, source: Ask(
        name,
        "/v1/messages",
        {"model": MODEL, "messages": [{"role": "user", "content": source.words(25)}], "max_tokens": 20}
        | {"temperature": 0, "stream": True},
    ),
    "repeating": lambda name, source: _completion(name, source, **_repeating(), **_stream(), logprobs=1),
    "repeating-choices": lambda name, source: _completion(
        name, source, **_seeded(source), **_repeating(), n=2, stream=True
    ),
    "repeating-whole": lambda name, source: _completion(name, source, **_repeating()),
}


@dataclass(frozen=True)
class Nonsense:
    """A request that has to be refused, with this status."""

    name: str
    path: str
    body: bytes
    status: int
    key: bool = True
    """Whether the client shows its API key."""


def nonsense(max_body: int) -> list[Nonsense]:
    """Returns requests that no server should answer otherwise."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    return [
        Nonsense("no-json", chat, b'{"messages": [', 400),
        Nonsense("not-an-object", text, b"[]", 400),
        Nonsense("no-such-model", text, b'{"model": "no-such", "prompt": "a"}', 404),
        Nonsense("hot", text, b'{"model": "soak", "prompt": "a", "temperature": 9}', 400),
        Nonsense("no-tokens", text, b'{"model": "soak", "prompt": []}', 400),
        Nonsense("unknown-token", text, b'{"model": "soak", "prompt": [99999999]}', 400),
        Nonsense("beyond-the-context", text, b'{"model": "soak", "prompt": "a", "max_tokens": 1000000}', 400),
        Nonsense("bad-grammar", text, b'{"model": "soak", "prompt": "a", "guided_regex": "(("}', 400),
        Nonsense("deep", chat, b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}", 400),
        Nonsense("long-text", text, b'{"model": "soak", "prompt": "' + b"word " * 60_000 + b'"}', 400),
        Nonsense("huge", text, b'{"model": "soak", "prompt": "' + b"a" * max_body + b'"}', 413),
        Nonsense("no-key", text, b'{"model": "soak", "prompt": "a"}', 401, key=False),
        Nonsense("no-route", "/v1/embeddings", b'{"model": "soak", "input": "a"}', 404),
    ]
