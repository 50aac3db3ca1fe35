"""The models that a node or a proxy serves, as its clients see them, in OpenAI's form."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class ModelCard(msgspec.Struct, frozen=True):
    """OpenAI's ``model`` object."""

    id: str
    created: int
    """Seconds since 1970 at which the process that answers started."""
    max_model_len: int | UnsetType = UNSET
    """Only a node knows it."""
    object: str = "model"
    owned_by: str = "pdserve"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"
