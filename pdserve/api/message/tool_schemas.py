"""The functions that an answer may call, as the parsers and the grammars of calls see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.api.message.schema_kinds import SchemaKinds


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """One function."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The JSON Schema of its arguments, which are an object."""
    strict: bool = False
    """Whether every call has to follow the schema."""
    values: SchemaKinds = field(init=False, repr=False, compare=False)
    """What the parameters' schemas admit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", SchemaKinds(self.parameters))

    def __deepcopy__(self, memo: dict[int, object]) -> ToolSchema:
        """Returns itself: nobody changes a schema."""
        return self

    def parameter(self, name: str) -> Any:
        """Returns the schema of a parameter; None if the function's schema has none for it."""
        properties = self.parameters.get("properties")
        return properties.get(name) if isinstance(properties, dict) else None

    def kinds(self, parameter: str) -> frozenset[str]:
        """Returns the kinds of values that a parameter may have."""
        return self.values.of(True if (schema := self.parameter(parameter)) is None else schema)
