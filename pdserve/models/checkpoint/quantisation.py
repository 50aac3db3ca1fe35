"""Refuses a folder of quantised weights whose method nobody here knows.

Their numbers mean nothing without the settings and scales that belong to them. Read as they are, they would give a
model that answers with nonsense and no error.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import msgspec

from pdserve.errors import ModelError


class _Settings(msgspec.Struct):
    """What a file may say of quantisation. ``text_config`` is the text part of a model that takes images, too."""

    quantization_config: dict[str, object] | None = None
    compression_config: dict[str, object] | None = None
    """What files of 2024 call it."""
    text_config: _Settings | None = None
    quantization: dict[str, object] | None = None
    """What ``hf_quant_config.json`` calls it."""


def refuse_unknown_quantisation(folder: Path, known: Container[object] = ()) -> None:
    """Raises ModelError if the folder's weights are quantised by a method that is not among ``known``."""
    for file in ("config.json", "hf_quant_config.json"):
        path = folder / file
        try:
            said = msgspec.json.decode(path.read_bytes(), type=_Settings)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as exc:
            raise ModelError(f"{path} cannot be read: {exc}") from exc
        text = said.text_config or _Settings()
        for settings in (said, text):
            own = settings.quantization_config or settings.compression_config
            if own and own.get("quant_method") not in known:
                raise ModelError(_refusal(path, own))
        if said.quantization and said.quantization.get("quant_algo"):
            raise ModelError(_refusal(path, {"quant_method": "modelopt"} | said.quantization))


def _refusal(path: Path, settings: dict[str, object]) -> str:
    method, algorithm = (settings.get(name) for name in ("quant_method", "quant_algo"))
    words = f"{method or 'without a quant_method'}" + (f", {algorithm}" if algorithm else "")
    return (
        f"the weights in {path.parent} are quantised ({path.name}: {words}), and such weights are not read here; "
        "a folder with bf16 weights or a GGUF file would be"
    )
