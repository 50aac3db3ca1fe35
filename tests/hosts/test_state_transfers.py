"""A state comes whole and right, or its prompt is computed again: it is lost, cancelled and corrupted on its way."""

from __future__ import annotations

import socket
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from lab.fault_matrix.models import MODELS, saved
from tests.cluster.test_cluster import open_stream
from tests.eventually import eventually
from tests.hosts.cluster import NEW_TOKENS, PROMPT_TOKENS, Hosts, prompt
from tests.hosts.test_network_faults import TIMEOUT_S, to_decode
from tests.tiny_models import Reference

pytestmark = pytest.mark.nightly

STATE_BYTES = 56_832
"""Two layers of six heads: 32 by 32 numbers of the sums, and three inputs of the convolution, in fp32."""
WHOLE_BYTES = -(-PROMPT_TOKENS // 16) * 16_384
PORTS = (8000, 8100, 9000, 9100)


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(MODELS["hybrid"], demo_model, tmp_path_factory.mktemp("tiny")).folder


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, NEW_TOKENS)


def received(hosts: Hosts) -> float:
    return hosts.decode.metric("kv_transfer_bytes_total", direction="received")


def before_the_state(hosts: Hosts, seed: int) -> int:
    """Returns the bytes that pass before the second third of a state is sent: what most of it comes behind."""
    # The first one may bring a handshake along. Behind a cut, prompts are computed here until that is answered.
    eventually(partial(has_come, hosts, seed), "a prompt comes from the prefill node")
    path, landed = to_decode(hosts), received(hosts)
    passed = path.passed
    hosts.ask(seed)
    passed = path.passed - passed
    eventually(partial(has_received, hosts, landed + WHOLE_BYTES + STATE_BYTES), "blocks and a state have landed")
    return passed - STATE_BYTES * 2 // 3


def has_come(hosts: Hosts, seed: int) -> bool:
    """Asks, and returns whether the prompt came from the prefill node."""
    hosts.cluster.until_idle()
    before = received(hosts)
    hosts.ask(seed)
    hosts.cluster.until_idle()
    return has_received(hosts, before + WHOLE_BYTES + STATE_BYTES)


def has_received(hosts: Hosts, size: float) -> bool:
    return received(hosts) == size


def stopped_in_the_state(hosts: Hosts, seed: int) -> socket.socket:
    """Sends a request, and cuts the way of its blocks when a third of its state has been sent."""
    path = to_decode(hosts)
    path.cut_after(before_the_state(hosts, seed))
    landed = received(hosts)
    stream = open_stream(hosts.cluster, prompt(seed), max_tokens=NEW_TOKENS)
    assert path.was_cut.wait(TIMEOUT_S)
    eventually(partial(has_received, hosts, landed + WHOLE_BYTES), "all but the state has landed")
    return stream


def rest_of(stream: socket.socket) -> None:
    text = b""
    while b"[DONE]" not in text:
        more = stream.recv(65_536)
        assert more, text
        text += more


def test_a_client_that_leaves_in_the_middle_of_a_state_leaves_nothing(hosts: Hosts, reference: Reference) -> None:
    with closing(stopped_in_the_state(hosts, 43)):
        pass
    hosts.network.wire.mend()
    hosts.cluster.until_idle()
    assert hosts.ask(44) == reference.answer(prompt(44))


def test_a_state_that_was_changed_on_its_way_is_not_computed_with(hosts: Hosts, reference: Reference) -> None:
    after = before_the_state(hosts, 53)
    corrupt = hosts.decode.metric("kv_transfer_failures_total", reason="corrupt")
    landed = received(hosts)
    corruption = to_decode(hosts).corrupt(spared=PORTS, after=after)
    assert hosts.ask(53) == reference.answer(prompt(53))
    assert corruption.done
    assert hosts.decode.metric("kv_transfer_failures_total", reason="corrupt") == corrupt + 1
    eventually(
        partial(has_received, hosts, landed + WHOLE_BYTES + STATE_BYTES), "all has landed, and not all was right"
    )
    hosts.cluster.until_idle()


def test_a_state_that_is_lost_for_good_is_computed_again(hosts: Hosts, reference: Reference) -> None:
    fallbacks = hosts.decode.metric("fallbacks_total")
    with closing(stopped_in_the_state(hosts, 63)) as stream:
        to_decode(hosts).cut = True
        rest_of(stream)
    assert hosts.decode.metric("fallbacks_total") == fallbacks + 1
    hosts.network.wire.mend()
    hosts.cluster.until_idle()
    assert hosts.ask(64) == reference.answer(prompt(64))
