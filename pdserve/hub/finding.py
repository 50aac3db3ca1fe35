"""Finds the model that ``--model`` means, and the name that clients use for it: the way in to this package."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pdserve.config import FetchConfig, ModelConfig, SchedulerConfig, Switch
from pdserve.errors import HubError, ModelError
from pdserve.hub.cache import CachedRepository, cache_of, cached_model, is_complete, repositories, repository_of
from pdserve.hub.download import DownloadEnded, DownloadFailed, DownloadOrder, Message, shown_progress
from pdserve.hub.selection import HubName, hub_name
from pdserve.log_format import printable
from pdserve.models.checkpoint.gguf.file import is_gguf
from pdserve.models.checkpoint.model_files import DEMO, DEMO_NAME, resolve_model, served_model_name
from pdserve.process import ServerProcess, python_program

_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
_LISTED = 5

Tell = Callable[[Message], None]


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that is complete on this machine."""

    path: Path
    """The folder or GGUF file."""
    name: str
    """The name that clients use if no other one was chosen."""
    commit: str = ""
    """The commit of the hub's repository; empty for a model that is not from the hub's cache."""
    fetched: int = 0
    """How many bytes came over the network."""


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A model that has to be fetched, because not all of it is in the cache."""

    name: HubName
    cache: Path


def find_model(model: ModelConfig | FetchConfig, environ: Mapping[str, str]) -> FoundModel:
    """Returns the model that ``--model`` means; fetches it, if need be, and shows on stderr how far that is.

    Raises ModelError and HubError.
    """
    known = known_model(model, environ)
    if isinstance(known, FoundModel):
        return known
    with shown_progress(str(known.name), sys.stderr) as tell:
        return asyncio.run(fetched_model(known, environ, tell))


def with_found_draft_model(
    scheduler: SchedulerConfig, model: ModelConfig, environ: Mapping[str, str]
) -> SchedulerConfig:
    """Returns the settings with the path of the draft model that they mean, which is fetched if need be.

    Raises ModelError and HubError.
    """
    if not scheduler.used_draft_model:
        return scheduler
    try:
        found = find_model(replace(model, path=scheduler.used_draft_model), environ)
    except ModelError as exc:
        raise ModelError(f"--draft-model: {exc}") from exc
    return replace(scheduler, draft_model=str(found.path))


def known_model(
    model: ModelConfig | FetchConfig, environ: Mapping[str, str], *, newest: bool = False
) -> FoundModel | WantedModel:
    """Returns the model that ``--model`` means, or what has to be fetched for it. Nothing here needs the network.

    A path that exists wins over a name of the hub. ``newest`` takes no model of the hub from the cache. Raises
    ModelError if there is no such model here and it cannot be on the hub, or the hub may not be asked.
    """
    text = model.path
    name = None if text == DEMO or Path(os.path.expanduser(text)).exists() else hub_name(text)
    if name is None:
        return _local(text)
    cache = cache_of(environ)
    offline = is_offline(model, environ)
    found = None if newest and not offline else cached_model(cache, name)
    if found is not None:
        commit = CachedRepository(cache, name.repository).commit(name.revision)
        return FoundModel(found, name.served, commit)
    if offline:
        raise ModelError(
            f"{name} is not in the cache {cache}, or not all of it, and the hub may not be asked (--offline or "
            f"HF_HUB_OFFLINE); {_cached(cache)}"
        )
    return WantedModel(name, cache)


def is_offline(model: ModelConfig | FetchConfig, environ: Mapping[str, str]) -> bool:
    """Returns whether the hub may not be asked: by ``--offline``, or by the variables of Hugging Face's programs."""
    asked = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
    return model.offline is Switch.ON or asked.upper() in _TRUE


async def fetched_model(
    wanted: WantedModel, environ: Mapping[str, str], tell: Tell, *, newest: bool = False
) -> FoundModel:
    """Fetches a model in a process of its own, which ends with this coroutine.

    ``tell`` gets what that says meanwhile. Raises ModelError and HubError.
    """
    last: Message | None = None

    def take(_: str, line: str) -> None:
        nonlocal last
        try:
            last = msgspec.json.decode(line, type=Message)
        except msgspec.MsgspecError:
            print(printable(line), file=sys.stderr, flush=True)
        else:
            tell(last)

    order = DownloadOrder(str(wanted.name), str(wanted.cache), newest)
    command = python_program("pdserve.hub.preparing", msgspec.json.encode(order).decode())
    process = ServerProcess("the download", command, environ, take)
    try:
        await process.wait()
    finally:
        await process.end(0.0)
    match last:
        case DownloadEnded(path, commit, fetched):
            return FoundModel(Path(path), wanted.name.served, commit, fetched)
        case DownloadFailed(message, passing=True):
            raise HubError(message)
        case DownloadFailed(message):
            raise ModelError(message)
    raise HubError(f"{wanted.name} was not fetched: {process.describe_end()}")


def _local(text: str) -> FoundModel:
    path = resolve_model(text)
    if text == DEMO:
        return FoundModel(path, DEMO_NAME)
    given = Path(os.path.expanduser(text)).absolute()
    repository = "" if is_gguf(path) else repository_of(given)
    if repository:
        return FoundModel(path, repository, path.name)
    return FoundModel(path, served_model_name(text, path))


def _cached(cache: Path) -> str:
    """Returns the models that are complete in the cache, in words."""
    names = [each.name for each in repositories(cache) if any(map(is_complete, each.snapshots()))]
    if not names:
        return "the cache has no complete model"
    more = f" and {len(names) - _LISTED} more" if names[_LISTED:] else ""
    return f"the cache has {', '.join(names[:_LISTED])}{more}"
