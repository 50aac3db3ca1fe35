"""Writes rules of llguidance's Lark. What comes from a client is written as a literal, or as the JSON of a schema."""

from __future__ import annotations

import json
from collections.abc import Iterable

from pdserve.errors import InvalidRequest
from pdserve.wire.grammar import MAX_GRAMMAR_BYTES

STRING = '%json {"type": "string"}'
NUMBER = '%json {"type": "number"}'
SPACES = r"/[\s\x1c-\x1f]*/"
"""The terminal of what Python's ``str.strip`` takes away."""


def quoted(text: str) -> str:
    """Returns the literal of a text."""
    # llguidance reads no delete character that is written as itself.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def one_of(expressions: Iterable[str]) -> str:
    """Returns the expression of a choice."""
    return f"({' | '.join(expressions)})"


class RuleBook:
    """The rules of one grammar that have no name of their own. Two with the same content are one."""

    def __init__(self, name: str = "the grammar of the calls that 'tools' ask for", param: str = "tools") -> None:
        """``name`` is what errors call the grammar, and ``param`` the field of the request that asks for it."""
        self._name = name
        self._param = param
        self._names: dict[str, str] = {}
        self._defined: set[str] = set()
        self._size = 0
        self._count = 0
        self.lines: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """Returns the name of the rule that has this body and these attributes, such as ``[lazy]``."""
        name = self._names.get(attributes + body)
        if name is None:
            name = self._names[attributes + body] = self.new_name()
            self.define(name + attributes, body)
        return name

    def terminal(self, body: str) -> str:
        """Returns the name of the terminal that has this body. A terminal has as many choices as it needs."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = self.new_name().upper()
            self.define(name, body)
        return name

    def has(self, name: str) -> bool:
        return name in self._defined

    def new_name(self) -> str:
        """Returns the name of a rule that is defined later."""
        self._count += 1
        return f"rule_{self._count}"

    def define(self, name: str, body: str) -> None:
        """Adds a rule. Raises InvalidRequest as soon as there is more than a grammar may have."""
        self._defined.add(name)
        line = f"{name}: {body}"
        self.lines.append(line)
        self._size += len(line.encode()) + 1
        if self._size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{self._name} would have more than {MAX_GRAMMAR_BYTES} bytes",
                param=self._param,
            )
