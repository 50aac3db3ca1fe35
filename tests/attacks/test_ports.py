"""Tests that control ports and UCX ports survive any bytes, messages and frames."""

from __future__ import annotations

import enum
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from pdserve.control.frame import Opener, Purpose, Sealer
from pdserve.errors import WrongReceiver
from pdserve.wire.discovery import Capacity, FromProxy, NodeHello, NodeInfo, ProxyWelcome, Role
from pdserve.wire.ids import new_id
from pdserve.wire.transfer import EngineSpec, Examine, Examined, ToDecode
from pdserve.wire.version import SPOKEN
from pdserve_kvtransfer.probe.examiner import Examiner, probe_memory
from pdserve_kvtransfer.ucx.ucx_transport import UcxLink, UcxTransport
from tests.attacks.attack import attacks
from tests.attacks.client import ANSWER_S
from tests.attacks.frames import BYTES, UCX_BYTES, FrameCase, Known, frame_cases, harmless, harmless_answer
from tests.attacks.insider import SECRET
from tests.attacks.target import Target
from tests.cluster.nodes import MODEL

CASES = tuple(frame_cases())
LISTENING = "0A"
"""The number of TCP's state "listening" in ``/proc``."""
pytestmark = pytest.mark.usefixtures("no_prompt_lost")


class Port(enum.Enum):
    """A control port, with the purpose of its frames. Every node has one for transfers, whatever its role."""

    PROXY = "proxy"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def purpose(self) -> Purpose:
        return Purpose.DISCOVERY if self is Port.PROXY else Purpose.TRANSFER

    def address(self, target: Target) -> str:
        if self is Port.PROXY:
            return target.cluster.control
        address: str = target.instance(target.prefill if self is Port.PREFILL else target.decode)["control"]
        return address


PORTS = {
    purpose: [port for port in Port if port.purpose is purpose] for purpose in (Purpose.DISCOVERY, Purpose.TRANSFER)
}


class Talk:
    """One connection to a control port, from a sender with a boot id of its own. It is a context manager."""

    def __init__(self, target: Target, port: Port) -> None:
        purpose = port.purpose
        self.own = new_id()
        self.sealer = Sealer(SECRET, purpose, self.own)
        self.receiver = b""
        """The boot id of the process that answered the greeting."""
        self.welcome = b""
        """The frame of that process's answer."""
        self._purpose = purpose
        messages = FromProxy if purpose is Purpose.DISCOVERY else ToDecode
        self._opener: Opener[msgspec.Struct] = Opener(SECRET, purpose, messages, receiver=self.own)  # type: ignore[arg-type]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.set(zmq.RCVTIMEO, int(ANSWER_S * 1000))
        self.socket.connect(port.address(target))

    def greet(self) -> None:
        """Asks who listens, in a frame that names no receiver. Raises zmq.Again if no answer comes in time."""
        greeting = NodeHello(self.own, new_id(), SPOKEN.newest, SPOKEN.oldest)
        examination = Examine(self.own, SPOKEN.newest, SPOKEN.oldest)
        self.socket.send(self.sealer.seal(greeting if self._purpose is Purpose.DISCOVERY else examination))
        self.welcome = self.socket.recv()
        opened = self._opener.open_from(self.welcome)
        assert isinstance(opened.message, ProxyWelcome | Examined), opened
        self.receiver = opened.sender

    def ask(self, *, names: bool = True) -> None:
        """Sends a harmless message."""
        self.socket.send(
            self.sealer.seal(harmless(self._purpose, self.own, names=names), self.receiver if names else None)
        )

    def next(self) -> msgspec.Struct | WrongReceiver:
        """Returns the next answer. Raises zmq.Again if none comes in time."""
        try:
            return self._opener.open(self.socket.recv())
        except WrongReceiver as exc:
            return exc

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)
        self._context.term()


def check_port(target: Target, port: Port) -> None:
    """Checks that a well-behaved node is answered, whether it knows the receiver yet or not."""
    with Talk(target, port) as talk:
        talk.greet()
        for names in (True, False):
            talk.ask(names=names)
            assert isinstance(talk.next(), harmless_answer(port.purpose, names=names))


@pytest.fixture(scope="module")
def spec(cluster_under_attack: Target) -> EngineSpec:
    with Examiner(Port.PREFILL.address(cluster_under_attack), SECRET, UcxTransport("")) as examiner:
        examined = examiner.examine(ANSWER_S)
    assert examined is not None
    return examined.spec


@pytest.fixture(scope="module")
def link() -> Iterator[UcxLink]:
    """Yields the UCX link at the address that an insider announces."""
    transport = UcxTransport("tcp")
    opened = transport.open_link(probe_memory(0))
    yield opened
    opened.close()
    transport.close()


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("port", Port)
def test_bytes_for_a_control_port(attacked: Target, port: Port, name: str) -> None:
    with raw(port.address(attacked)) as connection:
        connection.sendall(BYTES[name])
        check_port(attacked, port)
    attacked.attack_is_over()


@pytest.mark.parametrize("case", attacks(CASES))
def test_frames_for_a_control_port(attacked: Target, spec: EngineSpec, link: UcxLink, case: FrameCase) -> None:
    for port in PORTS[case.purpose]:
        attack_port(attacked, port, spec, link, case)


def attack_port(attacked: Target, port: Port, spec: EngineSpec, link: UcxLink, case: FrameCase) -> None:
    with Talk(attacked, port) as talk:
        talk.greet()
        known = Known(
            purpose=case.purpose,
            boot=talk.receiver,
            welcome=talk.welcome,
            spec=spec,
            node=other_node(attacked, port),
            address=link.address,
            own=talk.own,
            sealer=talk.sealer,
            names=case.names,
        )
        for parts in case.make(known):
            talk.socket.send_multipart(parts)
        if not case.cuts:
            talk.ask(names=case.names)
            check_answers(talk, case)
    # The attacker itself was answered, unless it was cut off.
    if attacked.attack_is_over() or case.cuts:
        check_port(attacked, port)


def check_answers(talk: Talk, case: FrameCase) -> None:
    """Reads up to the answer to the harmless frame, which was sent last. Slow answers of the engine may come later."""
    last = harmless_answer(case.purpose, names=case.names)
    if case.any_answers:
        while not isinstance(talk.next(), last):
            pass
        return
    wanted = [*case.answers, last]
    answers = [talk.next() for _ in wanted]
    assert Counter(map(type, answers)) == Counter(wanted), answers


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("port", Port)
def test_a_captured_frame_is_good_at_no_port(attacked: Target, port: Port, names: bool) -> None:
    """The frame was answered once. Sent again over another connection, to any process, it gets no answer."""
    with Talk(attacked, port) as heard:
        heard.greet()
        frame = heard.sealer.seal(harmless(port.purpose, heard.own, names=names), heard.receiver if names else None)
        heard.socket.send(frame)
        assert isinstance(heard.next(), harmless_answer(port.purpose, names=names))
        for at in Port:
            other = at is not port and at.purpose is port.purpose
            if other and not names:
                continue  # A frame that names no receiver is good once at each process.
            with Talk(attacked, at) as thief:
                thief.greet()
                thief.socket.send(frame)
                thief.ask()
                # The other node tells the sender that it is not the node that was meant.
                assert not other or isinstance(thief.next(), WrongReceiver)
                assert isinstance(thief.next(), harmless_answer(at.purpose))
    attacked.check_answers()


def other_node(target: Target, port: Port) -> NodeInfo:
    """Returns a node whose port this is not."""
    known = target.instance(target.prefill if port is Port.DECODE else target.decode)
    return NodeInfo(
        protocol=SPOKEN.newest,
        oldest_protocol=SPOKEN.oldest,
        name=known["name"],
        boot_id=bytes.fromhex(known["boot_id"]),
        role=Role.DECODE,
        url=known["url"],
        control="",
        model=MODEL,
        fingerprint=known["fingerprint"],
        capacity=Capacity(1, 1, 1, 1),
    )


@pytest.mark.parametrize("name", BYTES | UCX_BYTES)
def test_bytes_for_every_port_of_the_engines(attacked: Target, name: str) -> None:
    """These ports include those of UCX, over which the ordinary request's blocks move."""
    engines = [pid for process, pid in attacked.processes.items() if "engine" in process]
    reached = 0
    for address in {at for pid in engines for at in listening(pid)}:
        # The link of a former peer may be closing at this moment.
        with suppress(ConnectionRefusedError), raw(address) as connection:
            connection.sendall((BYTES | UCX_BYTES)[name])
            reached += 1
    assert reached >= len(engines)
    attacked.attack_is_over()


@contextmanager
def raw(address: str) -> Iterator[socket.socket]:
    parts = urlsplit(address)
    with (
        suppress(BrokenPipeError, ConnectionResetError),
        socket.create_connection((parts.hostname, parts.port)) as made,
    ):
        made.settimeout(ANSWER_S)
        yield made


def listening(pid: int) -> set[str]:
    """Returns the IPv4 addresses that a process listens on."""
    files: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # The process has closed it meanwhile.
            files.add(descriptor.readlink().name)
    found: set[str] = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING and f"socket:[{fields[9]}]" in files:
            host, port = fields[1].split(":")
            found.add(f"tcp://{ip_address(bytes.fromhex(host)[::-1])}:{int(port, 16)}")
    return found
