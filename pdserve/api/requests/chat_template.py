"""Renders a model's chat template, a Jinja program that comes with the model's files.

The result is that of transformers' ``apply_chat_template``, whose import takes longer than everything else that a
node's API process loads. Templates are not trusted: they run in Jinja's sandbox, see plain JSON values alone, and may
keep nothing under names that begin with an underscore.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "kwargs",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""The names that mean something to ``apply_chat_template``. A request gives its template no variables of these."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which messages bring reasoning. Templates read the first, and some the second."""
_END = "THE_MESSAGE_ENDS_HERE_FOR_NOW "
"""Stands behind a message that is to be continued. What the template puts behind it is cut off."""


class ChatTemplate:
    """One model's template. Threads may share it."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are variables of the template, by names like ``bos_token``."""
        self.text = text
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _compiled(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_refuse,
            strftime_now=lambda wanted: datetime.now().strftime(wanted),
            dict=_Dict(),
            namespace=_PlainNamespace,
        )
        return environment.from_string(self.text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Returns the text of a conversation. All that is given consists of what JSON has.

        Raises what the template raises, which may be anything, and ValueError for messages that it cannot continue.
        """
        if not messages:
            raise ValueError("a conversation needs a message")
        if continue_final_message and add_generation_prompt:
            raise ValueError("the last message cannot be continued where a new one begins")
        # Many templates write None where a message has a value that is null.
        chat = [_with_reasoning({k: v for k, v in message.items() if v is not None}) for message in messages]
        final = ""
        if continue_final_message:
            final = self._mark_end(chat)
        text = self._compiled.render(
            messages=chat,
            tools=[dict(tool) for tool in tools] or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        )
        return _before_end(text, final) if continue_final_message else text

    def _mark_end(self, chat: list[dict[str, Any]]) -> str:
        """Puts ``_END`` behind the last text of the last message, which is returned as it was."""
        content = chat[-1].get("content")
        if content is None or "content" not in self.text:
            raise ValueError("the final message has no content that the template could show and the model continue")
        if not isinstance(content, list):
            chat[-1]["content"] = content + _END
            return str(content)
        parts = [dict(part) for part in content]
        for part in reversed(parts):
            if "text" in part:
                final = part["text"]
                part["text"] = final + _END
                chat[-1]["content"] = parts
                return str(final)
        raise ValueError("the final message has no text to continue")


def _before_end(text: str, final: str) -> str:
    """Returns what stands before the last ``_END`` of ``text``. Raises ValueError if ``final`` is not there."""
    tag = _END.rstrip()
    at = text.rfind(tag)
    if at < 0 or final.strip() not in text:
        raise ValueError("the template does not show the final message as it is, so it cannot be continued")
    # A template that strips messages would have stripped the end of this one.
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, writes characters of HTML as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """Lets templates mark what an assistant says: ``{% generation %}…{% endgeneration %}`` is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """Is ``dict`` in templates, without the attributes of a class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """Refuses names that begin with an underscore, which lead to Python's insides."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may name a value self
        self, *given = args
        for name in (found := dict(*given, **values)):
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template cannot keep {name!r} in a namespace")
