"""A huge field that is refused costs the client's own request, and neither the answer's readers nor the process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.config import ModelConfig, NodeConfig
from pdserve.errors import MAX_MESSAGE_CHARS, MAX_PARAM_CHARS, InvalidRequest
from tests.api.node import MODEL, NodeUnderTest, scripted_node
from tests.api.plain_http import send
from tests.eventually import eventually
from tests.processes import pdserve

pytestmark = pytest.mark.integration

HUGE = "x" * 7_500_000 + "\U0001f642"
"""In Python it has four bytes a character."""
MOST_MIB = 12.0
"""A process that kept one of the larger blocks, of 30 MB, would grow by more."""
ANY = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
REFUSED: list[tuple[str, dict[str, object]]] = [
    ("/v1/chat/completions", {"tool_choice": HUGE}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": HUGE}]}),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": HUGE}}}),
    ("/v1/chat/completions", {"messages": [{"role": HUGE, "content": "x"}]}),
    ("/v1/chat/completions", {"logit_bias": {HUGE: 1}}),
    ("/v1/chat/completions", {"model": HUGE}),
    ("/v1/messages", {"max_tokens": 1, "tool_choice": {"type": HUGE}}),
    ("/v1/responses", {"input": "x", "truncation": HUGE}),
    ("/tokenize", {"prompt": HUGE, "messages": None}),
]


@pytest.fixture(scope="module")
def roomy(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeUnderTest]:
    """Yields a node that takes bodies of the default size."""
    config = NodeConfig(model=ModelConfig(served_model_name=MODEL))
    with scripted_node(config, model_dir, tmp_path_factory.mktemp("roomy"), forked=False) as running:
        yield running


def own_mib(pid: int) -> float:
    """Returns how much memory a process has that is no file's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def refuse_all(url: str) -> None:
    for path, fields in REFUSED:
        body = json.dumps({**ANY, **fields}, ensure_ascii=False).encode()
        answer = send("POST", f"{url}{path}", content=body, headers={"content-type": "application/json"})
        assert 400 <= answer.status < 600, path
        assert len(answer.body) < 4 * (MAX_MESSAGE_CHARS + MAX_PARAM_CHARS), (path, len(answer.body))


def until_small(pid: int, before_mib: float) -> None:
    """Waits until a process is as small as before. A client has its answer before the process lets the request go."""
    eventually(lambda: own_mib(pid) - before_mib < MOST_MIB, f"it has {MOST_MIB:g} MiB more at most")


def test_an_error_quotes_no_more_than_people_read() -> None:
    error = InvalidRequest(f"{HUGE} is not acceptable", param=HUGE)
    assert error.message.startswith("xxx")
    assert error.message.endswith("…")
    assert len(str(error)) == len(error.message) == MAX_MESSAGE_CHARS + 1
    assert error.param is not None
    assert len(error.param) == MAX_PARAM_CHARS
    assert InvalidRequest("short", param="n").message == "short"


def test_a_node_is_as_small_after_huge_fields_as_before(roomy: NodeUnderTest) -> None:
    pid = roomy.process.pid
    send("POST", f"{roomy.url}/v1/chat/completions", body=ANY)
    before = own_mib(pid)
    for _ in range(2):
        refuse_all(roomy.url)
    until_small(pid, before)


def test_a_proxy_is_as_small_after_huge_fields_as_before() -> None:
    with pdserve("proxy", "--port", "0", "--control-port", "0") as process:
        url, pid = process.listening().url, process.pid
        send("POST", f"{url}/v1/chat/completions", body=ANY)
        before = own_mib(pid)
        for _ in range(2):
            refuse_all(url)
        until_small(pid, before)
