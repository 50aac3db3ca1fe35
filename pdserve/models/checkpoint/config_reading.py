"""Reads the shape of a decoder from a Hugging Face ``config.json``, or from a GGUF file through ``gguf_settings``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pdserve.errors import ModelError
from pdserve.models.checkpoint.composite import text_settings, within_whole
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FamilyConfig
from pdserve.models.checkpoint.gguf_file import is_gguf, read_gguf
from pdserve.models.checkpoint.gguf_settings import gguf_recipe, gguf_settings
from pdserve.models.checkpoint.model_files import plain_json
from pdserve.models.checkpoint.quantisation import Quantisation, read_quantisation
from pdserve.models.checkpoint.safetensors_header import tensor_names
from pdserve.models.families.settings import FamilySettings
from pdserve.models.recipe import ModelRecipe, own_name
from pdserve.models.table import COMPOSITES, FAMILIES, family_of, settings_from_json

log = logging.getLogger(__name__)


class _Header(msgspec.Struct):
    """The settings that say how to read the others."""

    model_type: str | None = None
    layer_types: object = None
    configuration_files: object = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A ``config.json`` of a model that has a recipe."""

    family: str
    text: bytes


def read_decoder_config(path: Path) -> DecoderConfig:
    """Reads a folder's ``config.json`` (and ``generation_config.json`` for end-of-sequence ids), or a GGUF header.

    Raises ModelError if it is missing or malformed, or names a family that cannot be computed exactly.
    """
    if is_gguf(path):
        return _of_gguf_file(path)
    found = _found(path)
    if found is not None:
        return _of_folder(path, found)
    # This import loads what transformers needs to read a configuration: about 3 s, which other families do without.
    from pdserve.models.checkpoint.fallback_config import read_fallback_config

    fallback = read_fallback_config(path)
    return replace(fallback, eos_token_ids=_eos_token_ids(getattr(fallback.hf, "eos_token_id", None), path))


def read_family_config(path: Path) -> FamilyConfig:
    """Reads the configuration of a model that has a decoder here, as ``read_decoder_config`` does.

    Raises ModelError for a fallback model, too.
    """
    if is_gguf(path):
        return _of_gguf_file(path)
    found = _found(path)
    if found is None:
        raise ModelError(f"the model in {path} is computed by transformers; it is none of {sorted(FAMILIES)}")
    return _of_folder(path, found)


def _of_gguf_file(path: Path) -> FamilyConfig:
    file = read_gguf(path)
    family, settings = gguf_settings(file)
    config = _family_config(family, settings, path)
    return replace(config, recipe=gguf_recipe(file, settings))


def _of_folder(path: Path, found: _Found) -> FamilyConfig:
    quantisation = _quantisation(path, found)
    family, composite = found.family, found.family in COMPOSITES
    try:
        if composite:
            family, settings = text_settings(found.text)
        else:
            settings = settings_from_json(family, found.text)
    except ModelError as exc:
        raise ModelError(f"the {found.family} model in {path} cannot be served: {exc}") from exc
    config = _family_config(family, settings, path)
    recipe = _with_what_is_there(within_whole(config.recipe) if composite else config.recipe, path)
    end = _eos_token_ids(settings.eos_token_id, path)
    return replace(config, recipe=recipe, eos_token_ids=end, quantisation=quantisation)


def _with_what_is_there(recipe: ModelRecipe, path: Path) -> ModelRecipe:
    """Returns the recipe with a layer that drafts tokens only if the folder has its weights.

    Configurations are no evidence: transformers writes the number of such layers, and not their weights. A folder
    whose weights are missing counts as one without.
    """
    if recipe.draft is None:
        return recipe
    try:
        names = tensor_names(path)
    except ModelError:
        names = ()
    wanted = f"{recipe.draft.projection}."
    has_it = any(own_name(name, recipe.renamed).startswith(wanted) for name in names)
    return recipe if has_it else recipe.without_draft()


def quantisation_of(path: Path) -> Quantisation | None:
    """Returns how the weights of a folder are quantised, or None if they are not or transformers reads them.

    Raises ModelError as ``read_decoder_config`` does.
    """
    return None if is_gguf(path) or (found := _found(path)) is None else _quantisation(path, found)


def _quantisation(path: Path, found: _Found) -> Quantisation | None:
    return read_quantisation(path, FAMILIES[found.family].quantisations if found.family in FAMILIES else ())


def has_own_decoder(path: Path) -> bool:
    """Returns whether the configuration can be read without loading transformers, which takes seconds."""
    return is_gguf(path) or _found(path) is not None


def _found(folder: Path) -> _Found | None:
    """Reads the ``config.json``. Returns None if transformers has to read it."""
    try:
        text = plain_json((folder / "config.json").read_bytes())
        header = msgspec.json.decode(text, type=_Header)
    except (OSError, msgspec.DecodeError):
        return None
    family = family_of(header.model_type or "", header.layer_types)
    if family in COMPOSITES:
        return _Found(family, text)
    if family not in FAMILIES or header.configuration_files is not None:
        return None
    try:
        if settings_from_json(family, text).left_to_transformers():
            return None
    except ModelError:
        # What is wrong is said where the settings are used.
        pass
    return _Found(family, text)


def _family_config(family: str, settings: FamilySettings, path: Path) -> FamilyConfig:
    heads = settings.num_attention_heads
    try:
        settings.check()
        return FamilyConfig(
            family=family,
            vocab_size=settings.vocab_size,
            hidden_size=settings.hidden_size,
            num_layers=settings.num_hidden_layers,
            heads=heads,
            kv_heads=settings.kv_heads(),
            head_dim=settings.head_size(),
            attention_scale=settings.attention_scale(),
            attention_cap=settings.attention_cap(),
            windows=settings.windows(),
            max_positions=settings.max_position_embeddings,
            eos_token_ids=_ids(settings.eos_token_id),
            intermediate_size=settings.channels(),
            recipe=settings.recipe(),
        )
    except ModelError as exc:
        raise ModelError(f"the model in {path} cannot be served: {exc}") from exc


class _Generation(msgspec.Struct):
    """What is read of a ``generation_config.json``."""

    eos_token_id: int | list[int] | None = None


TOKEN_RULES = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
    *("sequence_bias", "no_repeat_ngram_size", "repetition_penalty", "min_length", "min_new_tokens", "stop_strings"),
)
"""The settings of a ``generation_config.json`` by which greedy answers differ, too, and which requests have here."""


def _eos_token_ids(own: int | list[int] | None, folder: Path) -> frozenset[int]:
    """Returns the ids of ``generation_config.json``, or ``own``, those of the configuration, if it has none."""
    path = folder / "generation_config.json"
    if not path.exists():
        return _ids(own)
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        generation = msgspec.convert(values, _Generation)
    except (OSError, msgspec.DecodeError) as exc:
        raise ModelError(f"{path} cannot be read: {exc}") from exc
    if rules := [f"{name} {values[name]}" for name in TOKEN_RULES if values.get(name) not in (None, 0, 1, [], {})]:
        log.warning("%s has %s, which no answer follows: requests say how to sample", path, ", ".join(rules)[:200])
    return _ids(own if generation.eos_token_id is None else generation.eos_token_id)


def _ids(ids: int | list[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
