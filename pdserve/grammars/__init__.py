"""Compiles grammars for one model's vocabulary: ``compiling``, on llguidance, after a ``trial`` in another process.

``referred`` follows the references of a JSON Schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the schema that a reference within ``root`` means; True, which admits everything, if it means none."""
    if not reference.startswith("#"):
        return True
    found: Any = root
    for step in filter(None, reference[1:].split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found
