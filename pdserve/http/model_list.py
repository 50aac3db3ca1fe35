"""The models that a node or a proxy serves, as its clients see them, in OpenAI's form."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec


class ModelCard(msgspec.Struct, frozen=True):
    """OpenAI's ``model`` object."""

    id: str
    created: int
    """Seconds since 1970 at which the process that answers started."""
    root: str
    """The model that this one is made of, which is itself."""
    max_model_len: int
    """The longest prompt and answer together, in tokens, that every node of the model takes."""
    object: str = "model"
    owned_by: str = "pdserve"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


def model_in_query(query: bytes) -> str | None:
    """Returns the model that the query of a URL names, as ``model=NAME``; None if it names none."""
    return parse_qs(query.decode("latin-1")).get("model", [None])[0]
