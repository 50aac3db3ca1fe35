"""``pdserve pull MODEL`` fetches a model into the cache of Hugging Face models, or its newest revision."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence

from pdserve.config import PullConfig
from pdserve.errors import ConfigError
from pdserve.hub.finding import FoundModel, fetched_model, known_model
from pdserve.hub.progress import in_gb, shown_progress
from pdserve.settings import load

_DESCRIPTION = (
    "Fetches what is served of a model into the cache of Hugging Face models, and looks for a newer revision of one "
    "that is there. Prints the folder or file."
)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError, ModelError and HubError."""
    config = load(PullConfig, argv, environ, prog="pdserve pull", description=_DESCRIPTION)
    if not config.model.path:
        raise ConfigError("which model? For example: pdserve pull Qwen/Qwen3-0.6B")
    known = known_model(config.model, environ, newest=True)
    if isinstance(known, FoundModel):
        found = known
    else:
        with shown_progress(str(known.name), sys.stderr) as tell:
            found = asyncio.run(fetched_model(known, environ, tell, newest=True))
    print(f"{found.name}: {_words(found)}", file=sys.stderr)
    print(found.path)
    return 0


def _words(found: FoundModel) -> str:
    if not found.commit:
        return "is on this machine"
    revision = f"revision {found.commit[:12]}"
    return f"{in_gb(found.fetched)} were fetched, {revision}" if found.fetched else f"nothing was to fetch, {revision}"
