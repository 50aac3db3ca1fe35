"""Says whether a model can be served, before its weights are here: the loader's own checks, of what is here."""

from __future__ import annotations

from pathlib import Path

from pdserve.errors import ModelError
from pdserve.hub.names import HubName
from pdserve.hub.selection import Selection
from pdserve.models.checkpoint.config_reading import GGUF_MODEL_TYPES, gguf_settings, read_decoder_config
from pdserve.models.checkpoint.decoder_config import FallbackConfig
from pdserve.models.checkpoint.gguf_file import is_gguf, read_gguf_start
from pdserve.models.checkpoint.model_files import INTEGER_FORMATS, PLAIN_FORMATS


def check_listing(name: HubName, selection: Selection, architecture: str) -> None:
    """Raises ModelError if the ``architecture`` that the hub tells of a repository's GGUF files cannot be served."""
    if selection.gguf and architecture and architecture not in GGUF_MODEL_TYPES:
        raise ModelError(
            f"{name} cannot be served: it is a model of architecture {architecture!r}; as GGUF files "
            f"these work: {', '.join(sorted(GGUF_MODEL_TYPES))}"
        )


def check_settings(folder: Path, name: str, formats: frozenset[str] = frozenset()) -> None:
    """Raises ModelError, with ``name`` for the folder, if its configuration tells that its weights cannot be served.

    ``formats`` are the number formats of its weights, as far as they are known.
    """
    try:
        config = read_decoder_config(folder)
    except ModelError as exc:
        raise ModelError(str(exc).replace(str(folder), name)) from exc
    unknown = sorted(formats - PLAIN_FORMATS - INTEGER_FORMATS)
    if unknown and not isinstance(config, FallbackConfig):
        raise ModelError(
            f"{name} cannot be served: its weights are in {', '.join(unknown)}, and its configuration does not say how "
            f"they were quantised; weights in safetensors files have to be in {', '.join(sorted(PLAIN_FORMATS))}"
        )


def check_gguf_start(path: Path, name: HubName) -> None:
    """Raises ModelError if the header of a GGUF file, of which the rest may be missing, tells that it cannot be served.

    A header that is not whole tells nothing.
    """
    file = read_gguf_start(path)
    if file is not None:
        try:
            gguf_settings(file)
        except ModelError as exc:
            raise ModelError(f"{name} cannot be served: {str(exc).replace(str(path), name.repository)}") from exc


def check_model(path: Path, name: str) -> None:
    """Raises ModelError, with ``name`` for the path, if a folder or GGUF file that is here cannot be served."""
    check_settings(path, name)
    if not is_gguf(path) and not (path / "tokenizer.json").is_file():
        raise ModelError(f"{name} cannot be served: it has no tokenizer.json")
