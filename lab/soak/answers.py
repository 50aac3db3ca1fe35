"""What an answer adds up to, streamed or whole, without its ids and times. So two answers to one request compare."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CLOSE = 2e-3
"""Two log probabilities that differ by less count as equal: fp32 rounds otherwise in another batch."""


class BrokenAnswer(Exception):
    """The bytes are no answer of the form that the request asked for."""


@dataclass
class Choice:
    """All that an answer says of one choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Each call's name and arguments."""
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)


@dataclass
class Answer:
    """An answer, or as much of it as has come."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    """The tokens of the prompt and of the answer."""
    whole: bool = False
    """Whether it has come to its end."""

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())


def difference(ours: Answer, wanted: Answer) -> str:
    """Returns in what two whole answers differ; empty if they are the same."""
    if ours.choices.keys() != wanted.choices.keys():
        return f"choices {sorted(ours.choices)}, not {sorted(wanted.choices)}"
    if ours.usage != wanted.usage:
        return f"usage {ours.usage}, not {wanted.usage}"
    for index, choice in ours.choices.items():
        other = wanted.choices[index]
        for name in ("finish", "token_ids", "text", "reasoning", "calls", "tokens"):
            mine, its = getattr(choice, name), getattr(other, name)
            if mine != its:
                return f"choice {index}, {name}: {_from_difference(mine, its)}"
        for name in ("logprobs", "prompt_logprobs"):
            if not _close(getattr(choice, name), getattr(other, name)):
                return f"choice {index}: other {name}"
    return ""


def prefix_difference(ours: Answer, wanted: Answer) -> str:
    """Returns in what an answer that broke off is not the beginning of ``wanted``; empty if it is."""
    for index, choice in ours.choices.items():
        other = wanted.choices.get(index)
        if other is None:
            return f"choice {index}, which there is not"
        for name in ("text", "reasoning"):
            mine, its = getattr(choice, name), getattr(other, name)
            if not its.startswith(mine):
                return f"choice {index}, {name}: {_from_difference(mine, its)}"
        if choice.token_ids != other.token_ids[: len(choice.token_ids)]:
            return f"choice {index}, token_ids: {_from_difference(choice.token_ids, other.token_ids)}"
    return ""


def _from_difference(ours: Any, wanted: Any) -> str:
    if not isinstance(ours, (str, list)):
        return f"{ours!r}, not {wanted!r}"
    same = next((at for at, pair in enumerate(zip(ours, wanted, strict=False)) if pair[0] != pair[1]), len(ours))
    return f"from {same} of {len(wanted)} on {ours[same : same + 12]!r}, not {wanted[same : same + 12]!r}"


def _close(ours: list[float], wanted: list[float]) -> bool:
    return len(ours) == len(wanted) and all(abs(a - b) <= CLOSE for a, b in zip(ours, wanted, strict=True))


@dataclass(frozen=True)
class Event:
    """An event of a stream. ``id`` is empty where it has none."""

    id: str
    kind: str
    data: str


class Events:
    """Takes a stream's bytes as they come, and gives back the events that they complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for text in whole:
            fields = dict[str, str]()
            for line in text.decode(errors="replace").split("\n"):
                name, _, value = line.partition(":")
                fields[name] = value.removeprefix(" ")
            if "data" in fields:
                yield Event(fields.get("id", ""), fields.get("event", ""), fields["data"])


class ErrorEvent(BrokenAnswer):
    """The stream ended with an error instead of the rest of the answer."""

    def __init__(self, data: str) -> None:
        self.code = _code(data)
        super().__init__(f"error event: {data[:300]}")


def _code(data: str) -> str:
    try:
        return str(json.loads(data)["error"].get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def add_event(answer: Answer, event: Event) -> None:
    """Adds an event of a stream to what has come. Raises ErrorEvent for an error, BrokenAnswer for nonsense."""
    if answer.whole:
        raise BrokenAnswer(f"an event behind the end: {event.data[:80]}")
    if event.data == "[DONE]":
        answer.whole = True
        return
    try:
        _add_said(answer, event, json.loads(event.data))
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise BrokenAnswer(f"{exc!r} in the event {event.data[:80]!r}") from exc


def _add_said(answer: Answer, event: Event, said: Any) -> None:
    if event.kind in ("error", "response.failed") or said.get("error"):
        raise ErrorEvent(event.data)
    if event.kind.startswith("response."):
        _add_of_response(answer, event.kind, said)
    elif event.kind:
        _add_of_message(answer, event.kind, said)
    else:
        _add_chunk(answer, said)


def read_body(path: str, body: bytes) -> Answer:
    """Returns an answer that came in one piece. Raises BrokenAnswer if it is none."""
    try:
        said = json.loads(body)
        answer = Answer(whole=True)
        if path == "/v1/responses":
            _add_of_response(answer, "response.completed", {"response": said})
            answer.choice(0).text = _texts(said)
        elif path == "/v1/messages":
            choice = answer.choice(0)
            choice.text = "".join(part["text"] for part in said["content"] if part["type"] == "text")
            choice.finish = said["stop_reason"]
            answer.usage = (_input_tokens(said["usage"]), said["usage"]["output_tokens"])
        else:
            _add_chunk(answer, said)
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise BrokenAnswer(f"{exc!r} in {body[:200]!r}") from exc
    return answer


def _add_chunk(answer: Answer, said: Mapping[str, Any]) -> None:
    if usage := said.get("usage"):
        answer.usage = (usage["prompt_tokens"], usage["completion_tokens"])
    for shown in said["choices"]:
        choice = answer.choice(shown["index"])
        part = shown.get("delta") or shown.get("message") or {}
        choice.text += shown.get("text") or part.get("content") or ""
        choice.reasoning += part.get("reasoning_content") or ""
        choice.finish = shown.get("finish_reason") or choice.finish
        choice.token_ids += shown.get("token_ids") or []
        for number, call in enumerate(part.get("tool_calls") or ()):
            at = call.get("index", number)
            while len(choice.calls) <= at:
                choice.calls.append(["", ""])
            choice.calls[at][0] += call["function"].get("name") or ""
            choice.calls[at][1] += call["function"].get("arguments") or ""
        _add_logprobs(choice, shown.get("logprobs"))
        for entry in shown.get("prompt_logprobs") or said.get("prompt_logprobs") or ():
            choice.prompt_logprobs += [next(iter(entry.values()))["logprob"]] if entry else []


def _add_logprobs(choice: Choice, said: Mapping[str, Any] | None) -> None:
    if not said:
        return
    if "content" in said:
        choice.tokens += [entry["token"] for entry in said["content"] or ()]
        choice.logprobs += [entry["logprob"] for entry in said["content"] or ()]
    else:
        choice.tokens += [f"{token} at {at}" for token, at in zip(said["tokens"], said["text_offset"], strict=True)]
        choice.logprobs += [value for value in said["token_logprobs"] if value is not None]


def _add_of_response(answer: Answer, kind: str, said: Mapping[str, Any]) -> None:
    choice = answer.choice(0)
    if kind == "response.output_text.delta":
        choice.text += said["delta"]
    elif kind in ("response.completed", "response.incomplete"):
        response = said["response"]
        answer.usage = (response["usage"]["input_tokens"], response["usage"]["output_tokens"])
        choice.finish = response["status"]
        if kind == "response.completed" or choice.text:
            shown = _texts(response)
            if choice.text and shown != choice.text:
                raise BrokenAnswer("the last event has another text than the deltas")
        answer.whole = True


def _texts(response: Mapping[str, Any]) -> str:
    items = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in items for part in item["content"] if part["type"] == "output_text")


def _add_of_message(answer: Answer, kind: str, said: Mapping[str, Any]) -> None:
    choice = answer.choice(0)
    if kind == "content_block_delta":
        choice.text += said["delta"].get("text", "")
    elif kind == "message_delta":
        choice.finish = said["delta"]["stop_reason"]
        answer.usage = (_input_tokens(said["usage"]), said["usage"]["output_tokens"])
    elif kind == "message_stop":
        answer.whole = True


def _input_tokens(usage: Mapping[str, Any]) -> int:
    """Returns the tokens of the prompt, however many of them a cache held."""
    return sum(usage.get(name) or 0 for name in _INPUT)


_INPUT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
