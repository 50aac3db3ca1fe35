"""Reads the shape of a decoder from a Hugging Face ``config.json``, or from a GGUF file through ``gguf.settings``.

A model that takes images or sounds, too, is served as a model of text alone. The settings of its text part are within
``text_config``, or in older files among those of the whole. Some that concern it are outside. Its tensors have the
names of a model of text, after one of few beginnings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FamilyConfig
from pdserve.models.checkpoint.gguf.file import is_gguf, read_gguf
from pdserve.models.checkpoint.gguf.settings import gguf_recipe, gguf_settings
from pdserve.models.checkpoint.model_files import plain_json
from pdserve.models.checkpoint.safetensors.header import tensor_names
from pdserve.models.checkpoint.safetensors.quantisation import Quantisation, read_quantisation
from pdserve.models.families.settings import FamilySettings
from pdserve.models.recipe import ModelRecipe, own_name
from pdserve.models.table import COMPOSITES, FAMILIES, TEXT_PARTS, family_of, settings_from_json, settings_from_values

RENAMED = (
    ("thinker.", ""),
    ("model.language_model.", "model."),
    ("language_model.", ""),
    ("model.text_model.", "model."),
    ("model.model.", "model."),
    ("model.lm_head.", "lm_head."),
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
        "merger.",
        "image_newline",
        "vit_large_projector.",
    ),
    *("audio_tower.", "embed_vision.", "embed_audio.", "mlp1.", "sound_encoder.", "sound_projection."),
    *("vision_final_layernorm.", "layerwise_projectors.", "spatial_projectors.", "vit.", "perceive."),
    *("vision_embedder.", "vision_adapter.", "vision_projection.", "vision_projector."),
)
UNUSED = (*_PARTS, *(f"model.{part}" for part in _PARTS), "talker.", "token2wav.", "code2wav.")
"""See ``ModelRecipe.unused``."""


class _Whole(msgspec.Struct):
    """The settings of the whole that concern its text part."""

    model_type: str = ""
    text_config: dict[str, object] | None = None
    llm_config: dict[str, object] | None = None
    """What released files of some models call ``text_config``."""
    thinker_config: _Whole | None = None
    """The settings of the part that writes text, where another one speaks."""
    tie_word_embeddings: bool | msgspec.UnsetType | None = msgspec.UNSET
    eos_token_id: int | list[int] | None = None


def text_settings(text: bytes) -> tuple[str, FamilySettings, int | list[int] | None]:
    """Returns the family and the settings of the text part, by a ``config.json`` of one of ``COMPOSITES``.

    The third result are the end-of-sequence ids; those of the settings are the part's own. Raises ModelError if a
    setting has a value that it cannot have, or if the part has no recipe.
    """
    try:
        whole = msgspec.json.decode(text, type=_Whole)
        composite = COMPOSITES[whole.model_type]
        whole = whole.thinker_config or whole
        part = whole.text_config or whole.llm_config or {}
        if not part and composite.flat:
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
    return family, settings, settings.eos_token_id if whole.eos_token_id is None else whole.eos_token_id


def _tied(of_whole: bool | msgspec.UnsetType | None, usual: bool | None, of_part: bool) -> bool:
    """Returns whether the head has the weights of the embedding. See ``Composite.tied``."""
    given = usual if of_whole is msgspec.UNSET else of_whole
    return bool(given) or (usual is None and of_part)


def within_whole(recipe: ModelRecipe) -> ModelRecipe:
    """Returns the recipe of a text part whose tensors are among those of the whole."""
    return replace(recipe, renamed=(*RENAMED, *recipe.renamed), unused=(*recipe.unused, *UNUSED))


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
    _warn_of_rules(path, {SUPPRESSED: file.metadata.get(SUPPRESSED)})
    return replace(config, recipe=gguf_recipe(file, settings))


def _of_folder(path: Path, found: _Found) -> FamilyConfig:
    quantisation = _quantisation(path, found)
    family, composite = found.family, found.family in COMPOSITES
    try:
        if composite:
            family, settings, end = text_settings(found.text)
        else:
            settings = settings_from_json(family, found.text)
            end = settings.eos_token_id
    except ModelError as exc:
        raise ModelError(f"the {found.family} model in {path} cannot be served: {exc}") from exc
    config = _family_config(family, settings, path)
    recipe = _with_what_is_there(within_whole(config.recipe) if composite else config.recipe, path)
    ids = _eos_token_ids(end, path)
    return replace(config, recipe=recipe, eos_token_ids=ids, quantisation=quantisation)


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
SUPPRESSED = "tokenizer.ggml.suppress_tokens"
"""What a GGUF file has of them."""


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
    _warn_of_rules(path, {name: values[name] for name in TOKEN_RULES if name in values})
    return _ids(own if generation.eos_token_id is None else generation.eos_token_id)


def _warn_of_rules(path: Path, rules: Mapping[str, object]) -> None:
    """Says which rules for tokens a file has that answers do not follow."""
    if has := [f"{name} {value}" for name, value in rules.items() if value not in (None, 0, 1, [], {})]:
        log.warning("%s has %s, which no answer follows: requests say how to sample", path, ", ".join(has)[:200])


def _ids(ids: int | list[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
