"""A plugin of pytest that points vLLM's tests at a running server: ``python -m pytest -p compat_plugin …``.

It runs in an environment without vLLM and without pdserve. The runner (``lab/compat/server_tests/run.py``) starts it
with this folder on the path, and reads the outcomes from the file of ``--outcomes``.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from outcomes_file import OutcomesFile, add_options
from stand_ins import Target, install

ABSENT_FLAGS = {
    "--api-key": "the cluster of these tests has no keys",
    "--enable-force-include-usage": "a client asks for the usage",
    "--enable-prompt-embeds": "prompts are texts and tokens",
    "--enable-request-id-headers": "request ids always come back",
    "--enable-server-load-tracking": "/metrics has the load",
    "--middleware": "no code of others runs in a proxy",
    "--root-path": "a proxy serves no prefix",
    "--return-tokens-as-token-ids": "a client asks for token ids",
    "--runner pooling": "the model writes text",
    "--speculative-config": "the cluster decides by itself what it drafts",
    "--tensor-parallel-size": "the cluster's nodes have one rank",
    "--uds": "a proxy listens on TCP alone",
}
"""Why the cluster is no server with such flags of vLLM. Flags that do not matter here are not named."""


SERVER_CLASS = "RemoteOpenAIServer"
SERVER_FIXTURE = re.compile(r"server(_with_\w+|_fixture)?")
CONFTESTS = ("tests.entrypoints.conftest", "tests.entrypoints.openai.responses.conftest")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    install(Target(config.getoption("--server-url"), config.getoption("--tokenizer")), ABSENT_FLAGS)
    config.pluginmanager.register(OutcomesFile(config))
    # Their fixtures. The conftest modules above them set up vLLM, and are not loaded (--noconftest).
    for module in CONFTESTS:
        config.pluginmanager.import_plugin(module)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out modules that never ask a server: without vLLM, many of them cannot even be imported."""
    if collection_path.suffix != ".py":
        return None
    sources = [collection_path, collection_path.parent / "conftest.py"]
    if any(SERVER_CLASS in source.read_text() for source in sources if source.is_file()):
        return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _asks_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _asks_a_server(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    # Other tests start their server themselves, and so name its class.
    if any(SERVER_FIXTURE.fullmatch(fixture) for fixture in item.fixturenames):
        return True
    return SERVER_CLASS in inspect.getsource(item.function)
