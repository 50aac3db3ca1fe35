"""Tests how the doctor reads a proxy's list of nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from pdserve.doctor.cluster import ListedInstance, check_instances, prefill_controls, read_instances
from pdserve.doctor.finding import Verdict

URL = "http://10.0.0.1:8000"
PREFILL = ListedInstance("p0", "prefill", "serving", "tcp://10.0.0.7:8200", "m", "f" * 64, 0.2)
DECODE = ListedInstance("d0", "decode", "serving", "", "m", "f" * 64, 0.2)


def changed(instance: ListedInstance, **values: object) -> ListedInstance:
    return msgspec.structs.replace(instance, **values)


@contextmanager
def proxy(body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/instances" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_list_is_read() -> None:
    # The proxy's list has more fields than the doctor reads.
    more = [{**msgspec.to_builtins(one), "load": {"running": 1}} for one in (PREFILL, DECODE)]
    with proxy(msgspec.json.encode(more)) as url:
        assert read_instances(url + "/", 5.0) == [PREFILL, DECODE]
    assert prefill_controls([PREFILL, DECODE, changed(PREFILL, control="")]) == [PREFILL.control]


@pytest.mark.parametrize("body", [b"<html>", b'{"error": 1}'])
def test_what_is_no_proxy_is_a_problem(body: bytes) -> None:
    with proxy(body) as url:
        found = read_instances(url, 5.0)
    assert isinstance(found, str)
    assert check_instances(URL, found)[0].verdict is Verdict.PROBLEM


def test_nobody_there_is_a_problem() -> None:
    found = read_instances("http://127.0.0.1:1", 5.0)
    assert isinstance(found, str) and "refused" in found


def test_a_good_cluster() -> None:
    findings = check_instances(URL, [PREFILL, DECODE, changed(DECODE, name="d1")])
    assert {found.verdict for found in findings} == {Verdict.OK}
    assert "1 prefill, 2 decode" in findings[0].seen


def test_a_mixed_node_computes_prompts_for_decode_nodes() -> None:
    mixed = changed(PREFILL, name="x0", role="mixed")
    assert prefill_controls([mixed, DECODE]) == [mixed.control]
    assert {found.verdict for found in check_instances(URL, [mixed, DECODE])} == {Verdict.OK}


@pytest.mark.parametrize(
    ("prefill", "said"),
    [
        ([changed(PREFILL, fingerprint="e" * 64)], "p0 has m eeeeeeeeeeee"),
        ([changed(PREFILL, model="other")], "p0 has other"),
        ([], "there is no prefill node"),
    ],
)
def test_a_decode_node_without_a_fitting_prefill_node(prefill: list[ListedInstance], said: str) -> None:
    findings = check_instances(URL, [DECODE, *prefill])
    (found,) = [found for found in findings if found.verdict is Verdict.PROBLEM]
    assert found.check == "pair for d0" and said in found.seen and "--model" in found.advice


def test_no_node_and_odd_states() -> None:
    assert check_instances(URL, [])[0].verdict is Verdict.PROBLEM
    findings = check_instances(URL, [changed(PREFILL, state="unreachable"), DECODE])
    (found,) = [found for found in findings if found.verdict is Verdict.WARNING]
    assert "p0 is unreachable" in found.seen
