"""The models that a node or a proxy serves, as its clients see them, in OpenAI's form."""

from __future__ import annotations

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
