"""The cache of Hugging Face models: ``pdserve models`` lists it, and ``pdserve pull MODEL`` fetches a model into it.

``pdserve models MODEL`` says whether one can be served here, and ``pdserve models --families`` what can be.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from pdserve.config import FetchConfig, ModelsConfig, PullConfig, Switch
from pdserve.errors import ConfigError, ModelError
from pdserve.hub.cache import CachedRepository, cache_of, is_complete, repositories
from pdserve.hub.download import Message, Note, in_gb, shown_progress
from pdserve.hub.finding import FoundModel, WantedModel, fetched_model, known_model
from pdserve.hub.selection import check_model, label_of
from pdserve.models.checkpoint.gguf.file import gguf_parts
from pdserve.models.checkpoint.safetensors.quantisation import METHODS
from pdserve.models.served import FORMATS_NOT_YET, NOT_YET, served_families
from pdserve.models.table import COMPOSITES
from pdserve.settings import load

EXIT_REFUSED = 1
_DESCRIPTION = (
    "Lists the models in the cache of Hugging Face models, their sizes, and which of them can be served here; or the "
    "families that can be served. With a model, says whether that can be served and how much is to fetch, before its "
    "weights are fetched."
)
_PULL_DESCRIPTION = (
    "Fetches what is served of a model into the cache of Hugging Face models, and looks for a newer revision of one "
    "that is there. Prints the folder or file."
)
_SERVED = "yes"


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the cache."""

    name: str
    nbytes: int
    revision: str
    served: str
    """``yes``, or why it cannot be served."""


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status: 1 for a model that cannot be served. Raises ConfigError, ModelError and HubError."""
    config = load(ModelsConfig, argv, environ, prog="pdserve models", description=_DESCRIPTION)
    as_json = config.listing.json is Switch.ON
    if config.model.path:
        return _describe(config.model, environ, as_json=as_json)
    if config.listing.families is Switch.ON and not as_json:
        _print_families()
        return 0
    cache = cache_of(environ)
    rows = [row for repository in repositories(cache) for row in cached_rows(repository)]
    if as_json:
        families = [asdict(family) for family in served_families()]
        quantised = {method: said for method, (said, _) in METHODS.items()}
        refused = {"quantised": quantised, "not_yet": NOT_YET, "formats_not_yet": FORMATS_NOT_YET}
        found = {"cache": str(cache), "models": [_as_json(row) for row in rows]}
        _print_json({**found, "families": families, "text_parts_of": sorted(COMPOSITES), **refused})
        return 0
    print(f"cache: {cache}", file=sys.stderr)
    print("'pdserve models --families' lists what can be served", file=sys.stderr)
    if not rows:
        print("no models; 'pdserve pull org/name' fetches one", file=sys.stderr)
        return 0
    _print_table([("MODEL", "SIZE", "REVISION", "SERVED HERE"), *map(_cells, rows)])
    return 0


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of as many cells, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())


def _print_json(value: dict[str, object]) -> None:
    print(msgspec.json.encode(value).decode())


def _print_families() -> None:
    """Prints what can be served, and what not yet."""
    rows = [
        (family.model_type, family.models, ", ".join(family.formats), "; ".join(family.parts))
        for family in served_families()
    ]
    _print_table([("FAMILY", "MODELS", "WEIGHTS", "PARTS"), *rows])
    print(f"also with quantised weights (quant_method): {', '.join(METHODS)}")
    print(f"with their text part, if that is one of these: {', '.join(sorted(COMPOSITES))}")
    print("others: those decoders that transformers computes through its attention interface, with one rank")
    for missing in dict.fromkeys(NOT_YET.values()):
        print(f"not yet: {missing} ({', '.join(name for name, lacks in NOT_YET.items() if lacks == missing)})")
    print(f"not yet: weights in folders in {', '.join(FORMATS_NOT_YET)}")


def _cells(row: Row) -> tuple[str, str, str, str]:
    return (row.name.ljust(5), in_gb(row.nbytes).ljust(4), row.revision.ljust(8), row.served)


def _as_json(row: Row) -> dict[str, object]:
    reason = "" if row.served == _SERVED else row.served
    return {"model": row.name, "bytes": row.nbytes, "revision": row.revision, "served": not reason, "reason": reason}


def cached_rows(repository: CachedRepository) -> Iterator[Row]:
    """Yields the models of a repository in the cache: each GGUF file, and the safetensors model of each commit."""
    seen: set[Path] = set()
    for snapshot in repository.snapshots():
        revision = ", ".join(repository.revisions(snapshot.name)) or snapshot.name[:12]
        for file in sorted(snapshot.rglob("*.gguf")):
            parts = gguf_parts(file)
            if file.is_file() and file.resolve() not in seen:
                seen.update(part.resolve() for part in parts)
                label = label_of(file.name)
                name = f"{repository.name}:{label}" if label else f"{repository.name}/{file.relative_to(snapshot)}"
                nbytes = sum(part.stat().st_size for part in parts if part.is_file())
                yield Row(name, nbytes, revision, _served(file, name))
        if (snapshot / "config.json").is_file():
            served = _served(snapshot, repository.name)
            if served == _SERVED and not is_complete(snapshot):
                served = f"not all of it is here: pdserve pull {repository.name}"
            yield Row(repository.name, _size(snapshot), revision, served)


def _served(path: Path, name: str) -> str:
    try:
        check_model(path, name)
    except ModelError as exc:
        return str(exc)
    return _SERVED


def _size(snapshot: Path) -> int:
    return sum(file.stat().st_size for file in snapshot.rglob("*") if file.is_file() and file.suffix != ".gguf")


def _describe(model: FetchConfig, environ: Mapping[str, str], *, as_json: bool) -> int:
    known = known_model(model, environ)
    path, missing, reason = "", 0, ""
    try:
        if isinstance(known, FoundModel):
            check_model(known.path, known.name)
            path = str(known.path)
            said = f"{known.name} can be served here; it is in {path}"
        else:
            missing = _missing(known)
            said = f"{known.name} can be served here; {in_gb(missing)} are to fetch: pdserve pull {known.name}"
    except ModelError as exc:
        said = reason = str(exc)
    if as_json:
        found = {"model": str(known.name), "served": not reason, "reason": reason}
        _print_json(found | {"path": path, "bytes_to_fetch": missing})
    else:
        print(said)
    return EXIT_REFUSED if reason else 0


def _missing(wanted: WantedModel) -> int:
    """Returns the bytes that are to fetch. Raises ModelError if the model cannot be served."""
    # It loads huggingface_hub, which no other path needs.
    from pdserve.hub.preparing import Preparation

    def tell(message: Message) -> None:
        if isinstance(message, Note):
            print(message.text, file=sys.stderr)

    return Preparation(wanted.name, wanted.cache, tell).missing()


def pull(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError, ModelError and HubError."""
    config = load(PullConfig, argv, environ, prog="pdserve pull", description=_PULL_DESCRIPTION)
    if not config.model.path:
        raise ConfigError("which model? For example: pdserve pull Qwen/Qwen3-0.6B")
    known = known_model(config.model, environ, newest=True)
    if isinstance(known, FoundModel):
        found = known
    else:
        with shown_progress(str(known.name), sys.stderr) as tell:
            found = asyncio.run(fetched_model(known, environ, tell, newest=True))
    print(f"{found.name}: {_fetched_words(found)}", file=sys.stderr)
    print(found.path)
    return 0


def _fetched_words(found: FoundModel) -> str:
    if not found.commit:
        return "is on this machine"
    revision = f"revision {found.commit[:12]}"
    return f"{in_gb(found.fetched)} were fetched, {revision}" if found.fetched else f"nothing was to fetch, {revision}"
