"""Finds the text part of a model that takes images or sounds, too. It is served as a model of text alone.

The part's settings are within ``text_config``, or in older files among those of the whole. Some that concern it are
outside. Its tensors have the names of a model of text, after one of few beginnings.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pdserve.errors import ModelError
from pdserve.models.families.settings import FamilySettings
from pdserve.models.recipe import ModelRecipe
from pdserve.models.table import COMPOSITES, FAMILIES, TEXT_PARTS, family_of, settings_from_values

RENAMED = (
    ("thinker.", ""),
    ("model.language_model.", "model."),
    ("language_model.", ""),
    ("model.text_model.", "model."),
)
"""See ``ModelRecipe.renamed``."""
_PARTS = (
    *(
        "visual.",
        "vision_tower.",
        "vision_model.",
        "multi_modal_projector.",
        "mm_projector.",
        "connector.",
        "image_newline",
    ),
    *("audio_tower.", "embed_vision.", "embed_audio."),
)
UNUSED = (*_PARTS, *(f"model.{part}" for part in _PARTS), "talker.", "token2wav.")
"""See ``ModelRecipe.unused``."""


class _Whole(msgspec.Struct):
    """The settings of the whole that concern its text part."""

    model_type: str
    text_config: dict[str, object] | None = None
    tie_word_embeddings: bool | msgspec.UnsetType | None = msgspec.UNSET
    eos_token_id: int | list[int] | None = None


def text_settings(text: bytes) -> tuple[str, FamilySettings]:
    """Returns the family and the settings of the text part, by a ``config.json`` of one of ``COMPOSITES``.

    Raises ModelError if a setting has a value that it cannot have, or if the part has no recipe.
    """
    try:
        whole = msgspec.json.decode(text, type=_Whole)
        composite = COMPOSITES[whole.model_type]
        part = whole.text_config or {}
        if whole.text_config is None and composite.flat:
            part = msgspec.json.decode(text, type=dict[str, object]) | {"model_type": composite.text}
    except msgspec.DecodeError as exc:
        raise ModelError(str(exc)) from exc
    family = family_of(str(part.get("model_type", composite.text)), part.get("layer_types"))
    if family not in FAMILIES | TEXT_PARTS:
        raise ModelError(f"its text part is a {family} model (text_config), which has no recipe")
    settings = settings_from_values(family, part)
    if settings.left_to_transformers():
        raise ModelError(f"its text part is a {family} model (text_config) with settings that no recipe has")
    settings.tie_word_embeddings = _tied(whole.tie_word_embeddings, composite.tied, settings.tie_word_embeddings)
    if whole.eos_token_id is not None:
        settings.eos_token_id = whole.eos_token_id
    return family, settings


def _tied(of_whole: bool | msgspec.UnsetType | None, usual: bool | None, of_part: bool) -> bool:
    """Returns whether the head has the weights of the embedding. See ``Composite.tied``."""
    given = usual if of_whole is msgspec.UNSET else of_whole
    return bool(given) or (usual is None and of_part)


def within_whole(recipe: ModelRecipe) -> ModelRecipe:
    """Returns the recipe of a text part whose tensors are among those of the whole."""
    return replace(recipe, renamed=RENAMED, unused=(*recipe.unused, *UNUSED))
