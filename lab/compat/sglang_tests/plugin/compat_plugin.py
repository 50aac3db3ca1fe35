"""A plugin of pytest that points SGLang's tests at a running server: ``python -m pytest -p compat_plugin …``.

It runs in an environment without SGLang and without pdserve. The runner (``lab/compat/server_tests/run.py``) starts
it with this folder on the path, and reads the outcomes from the file of ``--outcomes``.
"""

from __future__ import annotations

import pytest
from outcomes_file import OutcomesFile, add_options
from stand_ins import Target, install

ABSENT_FLAGS = {
    "--context-length": "the cluster's model has a longer context",
    "--enable-custom-logit-processor": "a client's code runs on no node",
    "--enable-return-hidden-states": "hidden states are not shown",
    "--is-embedding": "the model writes text",
    "--speculative-algorithm": "the cluster decides by itself what it drafts",
}
"""Why the cluster is no server with such flags of SGLang. Flags that do not matter here are not named."""

REPEATS = ("TestToolChoiceQwen25", "TestToolChoiceMistral", "TestToolChoiceLfm2")
"""These classes run the tests of another class once more, with other models."""


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    target = Target(config.getoption("--server-url"), config.getoption("--server-model"), config.rootpath)
    install(target, config.getoption("--tokenizer"), ABSENT_FLAGS)
    config.pluginmanager.register(OutcomesFile(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    repeated = [item for item in items if any(f"::{name}::" in item.nodeid for name in REPEATS)]
    config.hook.pytest_deselected(items=repeated)
    items[:] = [item for item in items if item not in repeated]
