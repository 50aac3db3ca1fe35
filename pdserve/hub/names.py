"""The names of models on the hub, and which texts are such names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from pdserve.errors import ModelError

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
