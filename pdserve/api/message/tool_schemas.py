"""The functions that an answer may call, as the parsers and the grammars of calls see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """One function."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The JSON Schema of its arguments, which are an object."""
    strict: bool = False
    """Whether every call has to follow the schema."""

    def takes_text(self, parameter: str) -> bool:
        """Returns whether the schema says that a parameter is a string, and may be nothing else."""
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        return isinstance(schema, dict) and schema.get("type") == "string"
