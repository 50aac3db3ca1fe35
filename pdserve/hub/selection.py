"""Reads names of models on the hub, and chooses the files that a name means, or says why there are none."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.checkpoint.gguf.architectures import ARCHITECTURES
from pdserve.models.checkpoint.gguf.file import gguf_parts, is_gguf, read_gguf_start
from pdserve.models.checkpoint.gguf.settings import check_keys, gguf_settings
from pdserve.models.checkpoint.model_files import (
    INDEX,
    INTEGER_FORMATS,
    PLAIN_FORMATS,
    SINGLE_FILE,
    SUFFIX,
    TOKENIZER_FILES,
    TOKENIZERS,
    main_tokenizer,
)

MAIN = "main"
"""The revision that a name without one means."""
GGUF = ".gguf"
FORMS = "org/name, org/name@revision, org/name:Q4_K_M, org/name/file.gguf"
"""The forms of a name, for messages."""

_ADDRESS = re.compile(r"(?:https://)?(?:huggingface\.co|hf\.co)/(?=[^/]+/)")
"""What stands before a name that was copied from a browser, or that Ollama takes."""
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.)){0,95}"
_NAME = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?:/(?P<file>[^@:]+\.gguf)|:(?P<quantisation>[\w.-]+))?"
    r"(?:@(?P<revision>[\w./-]+?)(?::(?P<later>[\w.-]+))?)?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model in a repository of the hub."""

    repository: str
    """The repository, as ``org/name``."""
    revision: str = MAIN
    """A branch, a tag or a commit."""
    quantisation: str = ""
    """The label of the GGUF file that is meant, such as ``Q4_K_M``; empty if the name has none."""
    file: str = ""
    """The GGUF file that is meant, as its path within the repository; empty if the name has none."""

    @property
    def served(self) -> str:
        """The name that clients use: as it was given, without the revision."""
        return self.repository + (f"/{self.file}" if self.file else "") + self._label

    @property
    def _label(self) -> str:
        return f":{self.quantisation}" if self.quantisation else ""

    def __str__(self) -> str:
        return self.served + ("" if self.revision == MAIN else f"@{self.revision}")


def hub_name(text: str) -> HubName | None:
    """Returns the model of the hub that ``text`` names, or None if it can only be a path of this machine.

    Raises ModelError if it names a model of the hub twice over.
    """
    short = _ADDRESS.sub("", text, count=1) if _ADDRESS.match(text) else text
    found = _NAME.fullmatch(short)
    if found is None or text.startswith((".", "/", "~")):
        return None
    revision, later = found["revision"] or MAIN, found["later"]
    file = found["file"] or ""
    if later and (file or found["quantisation"]):
        raise ModelError(f"{text!r} says twice which file is meant; one of these is right: {FORMS}")
    if not is_inside(revision) or (file and not is_inside(file)):
        return None
    return HubName(found["repository"], revision, found["quantisation"] or later or "", file)


def is_inside(path: str) -> bool:
    """Returns whether a path of a repository stays within the folder that it is put in, and can be shown."""
    parts = PurePosixPath(path).parts
    return bool(parts) and path.isprintable() and not path.startswith("/") and "\\" not in path and ".." not in parts


_LABEL = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d[A-Z0-9_]*|TQ\d_\d|MXFP4[A-Z0-9_]*|BF16|F16|FP16|F32|FP32))"
    r"(?:-\d{5}-of-\d{5})?\.gguf$",
    re.IGNORECASE,
)
_NO_LANGUAGE_MODEL = re.compile(r"(?:^|/)(?:mmproj|imatrix)[^/]*$|imatrix", re.IGNORECASE)
"""GGUF files beside a model: the part that reads images, and what a quantisation was made with."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHER = (".h5", ".msgpack", ".onnx", ".npz", ".nemo", ".mlmodel", ".tflite", ".ot", ".engine")
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Selection:
    """The files that are served, as paths within the repository."""

    settings: tuple[str, ...]
    """Configuration, tokeniser, template and index of a safetensors model; none for a GGUF file, which has all that."""
    weights: tuple[str, ...]
    """The files with weights. Where ``settings`` has an index, it says which of them are read."""

    @property
    def gguf(self) -> str:
        """The GGUF file, or the first of its parts; empty for a safetensors model."""
        return self.weights[0] if self.weights[0].endswith(GGUF) else ""


def select(name: HubName, files: Set[str]) -> Selection:
    """Returns what is served of a repository with these ``files``. Raises ModelError if nothing can be."""
    files = {file for file in files if is_inside(file)}
    if name.file or name.quantisation:
        return Selection((), _one_gguf(name, files))
    weights = sorted(file for file in files if file.endswith(SUFFIX) and "/" not in file)
    if weights and "config.json" in files:
        settings = tuple(sorted(file for file in files if any(fnmatch(file, kind) for kind in _settings_kinds(file))))
        if INDEX not in files and SINGLE_FILE in files:
            weights = [SINGLE_FILE]
        if not files & set(TOKENIZERS):
            raise ModelError(
                f"{name.repository} cannot be served: it has no tokeniser in {', '.join(TOKENIZERS[:-1])} or "
                f"{TOKENIZERS[-1]}"
            )
        return Selection(settings, tuple(weights))
    if any(_is_model(file) for file in files):
        return Selection((), _one_gguf(name, files))
    raise ModelError(_nothing(name, files, bool(weights)))


def _settings_kinds(file: str) -> tuple[str, ...]:
    """Returns the patterns of files that are fetched for their settings: fnmatch's ``*`` would cross folders."""
    return tuple(kind for kind in TOKENIZER_FILES if kind.count("/") == file.count("/"))


def label_of(file: str) -> str:
    """Returns the label of a GGUF file's quantisation in capitals, such as ``Q4_K_M``; empty if its name has none."""
    found = _LABEL.search(file)
    return found[1].upper() if found and _is_model(file) else ""


def labels(files: Set[str]) -> list[str]:
    """Returns the labels of all GGUF files."""
    return sorted({label_of(file) for file in files} - {""})


def parts_of(file: str) -> tuple[str, ...]:
    """Returns the GGUF files of the model that ``file`` is a part of: that one alone, or all its parts."""
    return tuple(map(str, gguf_parts(Path(file))))


def _is_model(file: str) -> bool:
    return file.endswith(GGUF) and not _NO_LANGUAGE_MODEL.search(file)


def _one_gguf(name: HubName, files: Set[str]) -> tuple[str, ...]:
    """Returns the parts of the one GGUF model that ``name`` means. Raises ModelError if there is none, or several."""
    models = {file for file in files if _is_model(file)}
    if name.file:
        found = {file for file in files if file == name.file}
    elif name.quantisation:
        found = {file for file in models if label_of(file) == name.quantisation.upper()}
    else:
        found = models
    whole = sorted({parts_of(file) for file in found})
    if not whole:
        raise ModelError(f"{name.repository} has no {_wanted(name)}; {_choices(name, models)}")
    if len(whole) > 1:
        if not name.quantisation and len(labels(models)) > 1:
            raise ModelError(f"{name.repository} has several GGUF files; {_choices(name, models)}")
        firsts = [parts[0] for parts in whole]
        raise ModelError(f"{name} means several GGUF files; name one of them: {_listed_files(name, firsts)}")
    if missing := [part for part in whole[0] if part not in files]:
        raise ModelError(f"{name} is in {len(whole[0])} parts, and {name.repository} lacks {missing[0]}")
    return whole[0]


def _wanted(name: HubName) -> str:
    return f"file {name.file}" if name.file else f"GGUF file of quantisation {name.quantisation}"


def _choices(name: HubName, models: Set[str]) -> str:
    if found := labels(models):
        return f"say which one as {name.repository}:QUANTISATION, of {', '.join(found)}"
    whole = sorted({parts_of(file)[0] for file in models})
    return f"it has {_listed_files(name, whole)}" if whole else "it has no other GGUF file"


def _listed_files(name: HubName, files: list[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(f"{name.repository}/{file}" for file in files[:_SHOWN]) + more


def _nothing(name: HubName, files: Set[str], weights: bool) -> str:
    """Says why nothing of a repository can be served."""
    repository = name.repository
    if "adapter_config.json" in files:
        return f"{repository} cannot be served: it is an adapter of a model; merge it into the model"
    if weights:
        return f"{repository} cannot be served: it has no config.json, which says how to compute a model"
    pickled = sorted(file for file in files if file.endswith(_PICKLED) and "training_args" not in file)
    if pickled:
        return (
            f"{repository} cannot be served: its weights are pickled files only ({pickled[0]}), which could run any "
            "program when they are read; take a repository with .safetensors or .gguf files"
        )
    others = sorted({other for file in files for other in _OTHER if file.endswith(other)})
    nested = sorted(file for file in files if file.endswith(SUFFIX))
    found = f"weights in {', '.join(others)} only" if others else "no weights"
    if nested:
        found = f"weights in folders of its own only ({nested[0]})"
    return f"{repository} cannot be served: it has {found}; .safetensors and .gguf files can be"


def check_listing(name: HubName, selection: Selection, architecture: str) -> None:
    """Raises ModelError if the ``architecture`` that the hub tells of a repository's GGUF files cannot be served."""
    if selection.gguf and architecture and architecture not in ARCHITECTURES:
        raise ModelError(
            f"{name} cannot be served: it is a model of architecture {architecture!r}; as GGUF files "
            f"these work: {', '.join(sorted(ARCHITECTURES))}"
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
    if unknown and isinstance(config, FamilyConfig) and config.quantisation is None:
        raise ModelError(
            f"{name} cannot be served: its weights are in {', '.join(unknown)}, and its configuration does not say how "
            f"they were quantised; weights in safetensors files have to be in {', '.join(sorted(PLAIN_FORMATS))}"
        )


def check_gguf_start(path: Path, name: HubName) -> None:
    """Raises ModelError if the header of a GGUF file, of which the rest may be missing, tells that it cannot be served.

    A header that is not complete says nothing.
    """
    file = read_gguf_start(path)
    if file is not None:
        try:
            # The first of several parts has all settings, but not all tensors.
            (check_keys if file.get("split.count", int, 1) > 1 else gguf_settings)(file)
        except ModelError as exc:
            raise ModelError(f"{name} cannot be served: {str(exc).replace(str(path), name.repository)}") from exc


def check_model(path: Path, name: str) -> None:
    """Raises ModelError, with ``name`` for the path, if a folder or GGUF file that is here cannot be served."""
    check_settings(path, name)
    if not is_gguf(path):
        try:
            main_tokenizer(path)
        except ModelError as exc:
            raise ModelError(f"{name} cannot be served: {str(exc).replace(str(path), 'it')}") from exc
