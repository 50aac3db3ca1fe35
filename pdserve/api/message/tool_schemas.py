"""The functions that an answer may call, as the parsers and the grammars of calls see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment"}
)
"""Keywords that say nothing about what a value may be."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """One function."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The JSON Schema of its arguments, which are an object."""
    strict: bool = False
    """Whether every call has to follow the schema."""

    def parameter(self, name: str) -> Any:
        """Returns the schema of a parameter; None if the function's schema has none for it."""
        properties = self.parameters.get("properties")
        return properties.get(name) if isinstance(properties, dict) else None

    def takes_text(self, parameter: str) -> bool:
        """Returns whether the schema says that a parameter is a string, and may be nothing else."""
        schema = self.parameter(parameter)
        return isinstance(schema, dict) and schema.get("type") == "string"
