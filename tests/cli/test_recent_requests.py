"""``pdserve trace --slowest`` and ``--failed``: which requests they choose, and what they say of them."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request

import msgspec
import pytest

from pdserve.cli.watch.trace import failed, slowest, table
from pdserve.wire.status import Incident, IncidentKind, RequestStage, RequestView
from pdserve_proxy.status.report import StatusReport
from tests.cli.in_process import call
from tests.cli.test_top_screen import report
from tests.processes import pdserve


def ended(name: str, arrived_s: float, total_s: float, outcome: str = "ok", status: int = 200) -> RequestView:
    return RequestView(
        name,
        "/v1/completions",
        arrived_s,
        stage=RequestStage.ENDED,
        decode="decode-0",
        prefill="prefill-0",
        prompt_done_s=arrived_s + 0.5,
        first_token=True,
        ended_s=arrived_s + total_s,
        outcome=outcome,
        status=status,
    )


def listing(*requests: RequestView, incidents: tuple[Incident, ...] = ()) -> StatusReport:
    return msgspec.structs.replace(report(incidents=incidents), ended=requests)


def test_the_slowest_come_first() -> None:
    listed = listing(ended("a", 10, 2), ended("b", 11, 5), ended("c", 12, 1))
    assert [one.id for one in slowest(listed, 2)] == ["b", "a"]
    (first, *_) = slowest(listed, 1)
    assert (first.came, first.ttft_s, first.total_s) == (1_700_000_000.0 - 89, 0.5, 5)


def test_the_failed_ones_are_the_clusters_faults_the_newest_first() -> None:
    listed = listing(
        ended("fine", 10, 2),
        ended("lost", 11, 5, "upstream_lost"),
        ended("left", 12, 1, "client_gone", 499),
        ended("full", 13, 1, "refused", 503),
        incidents=(
            Incident(IncidentKind.REQUEST_FAILED, 5.0, "a defect", "decode-1", "old"),
            Incident(IncidentKind.REQUEST_FAILED, 16.0, "2 nodes were lost", "decode-0", "lost"),
            Incident(IncidentKind.NODE_LOST, 15.0, "it is gone", "decode-0"),
        ),
    )
    found = failed(listed, 10)
    assert [(one.id, one.why) for one in found] == [("full", ""), ("lost", "2 nodes were lost"), ("old", "a defect")]
    assert [one.id for one in failed(listed, 1)] == ["full"]
    lines = list(table(found))
    assert lines[0].split()[0] == "request"
    assert "503" in lines[1] and "upstream_lost" in lines[2]
    assert lines[3].strip() == "2 nodes were lost"


@pytest.mark.integration
def test_the_command_lists_and_draws_what_failed() -> None:
    def trace(*flags: str) -> subprocess.CompletedProcess[str]:
        return call("trace", *flags, "--proxy-url", url)

    with pdserve("proxy", "--port", "0", "--control-port", "0", "--status-page", "on") as proxy:
        url = proxy.listening().url
        done = trace("--failed")
        assert (done.returncode, done.stdout) == (0, "")
        assert f"no request has failed that {url} remembers" in done.stderr
        for name in ("first", "second"):
            body = json.dumps({"model": "m", "prompt": "Why?"}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body)
            request.add_header("content-type", "application/json")
            request.add_header("x-request-id", name)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=60)
            caught.value.close()
            assert caught.value.code == 503
        done = trace("--failed")
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()[1:] if " 503  " in line] == ["second", "first"]
        assert "second: refused 503" in done.stdout and "first: refused 503" in done.stdout
        (line,) = trace("--failed", "1", "--json").stdout.splitlines()
        assert json.loads(line)["request_id"] == "second"
        assert json.loads(trace("--slowest", "1", "--json").stdout)["request_id"] in ("first", "second")
