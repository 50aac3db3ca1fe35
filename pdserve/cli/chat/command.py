"""``pdserve chat`` talks to a model in the terminal: on a server, or on a cluster of its own, which ends with it."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import re
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from pdserve.cli.chat.server import (
    Access,
    Answer,
    AskFailed,
    Conversation,
    Piece,
    Sampling,
    Server,
    find_server,
    latency_line,
    read_timeline,
    stream_answer,
)
from pdserve.config import AdmissionConfig, ChatConfig, Switch, TalkConfig, UpConfig
from pdserve.errors import ClusterFailed, ConfigError
from pdserve.http.tls import Trust, read_authorities
from pdserve.log_format import printable
from pdserve.process import pdserve_command
from pdserve.serving import LONGEST_START_S, ClusterChild
from pdserve.settings import load_with_file, state_folder
from pdserve.settings.setting import settings_of, to_text
from pdserve.signals import ended_in_order
from pdserve_proxy.credentials import read_api_keys

END_S = 30.0
"""The cluster has this long to end, and is killed then. It has no requests any more."""
_COMMAND = pdserve_command("up", "--host", "127.0.0.1", "--port", "0", "--ready-json", "on")
_READ_BYTES = 65536
_MOST_NOTICES = 20


def cluster_environ(config: ChatConfig, environ: Mapping[str, str], file: str) -> dict[str, str]:
    """Returns the environment of the cluster: ``environ`` and ``file`` with the settings of ``config`` in them."""
    found = dict(environ)
    of_up = {setting.flag for setting in settings_of(UpConfig)}
    for setting in settings_of(ChatConfig):
        if setting.flag in of_up:
            value = getattr(getattr(config, setting.section), setting.field)
            found.pop(setting.env, None)
            # With a file, a default may stand against what the file says.
            if value != setting.default or (file and value != ""):
                found[setting.env] = to_text(value)
    found["PDSERVE_ASK"] = ""
    if config.talk.api_key_file:
        found["PDSERVE_API_KEY_FILE"] = config.talk.api_key_file
    if file:
        found["PDSERVE_CONFIG"] = file
    return found


class OwnCluster:
    """The cluster of one chat, within a ``with`` block."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lines = b""
        self._is_ready = False
        self._reading = threading.Lock()

    def __enter__(self) -> Self:
        """Returns when the cluster is ready; until then, the user sees what it says. Raises ClusterFailed."""
        # A terminal of its own, as large as ours: the cluster shows how its start moves, and later on its lines do not
        # come between those of the chat.
        ours, theirs = os.openpty() if sys.stderr.isatty() else os.pipe()
        if sys.stderr.isatty():
            size = fcntl.ioctl(sys.stderr, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        self._reader = threading.Thread(target=self._read, args=(ours,), name="cluster lines", daemon=True)
        self._reader.start()
        self._child = ClusterChild(_COMMAND, self._environ, LONGEST_START_S, END_S, stderr=theirs)
        try:
            self._child.start()
            self._cluster = self._child.cluster()
            # What it said before it was ready belongs to its start.
            with self._reading:
                while _is_readable(ours, 0):
                    self._take(ours)
                self._is_ready = True
        except BaseException as exc:
            self._child.end()
            os.close(theirs)
            self._reader.join(END_S)
            if isinstance(exc, ClusterFailed):
                raise ClusterFailed("the cluster did not start; the lines above say why") from exc
            raise
        os.close(theirs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the cluster: in order, or at once when the user interrupts that. Afterwards nothing of it is left."""
        if not self._child.ended.done():
            with suppress(OSError):  # the terminal may be gone
                print("the cluster ends", file=sys.stderr, flush=True)
        self._child.end()
        self._reader.join(END_S)

    @property
    def url(self) -> str:
        return self._cluster.url

    def notices(self) -> Sequence[str]:
        """Returns the lines that the cluster has written since it was ready or since the last call."""
        lines, self._lines = self._lines, b""
        found = [line for line in lines.decode(errors="replace").splitlines() if line.strip()]
        return found[-_MOST_NOTICES:]

    def check(self) -> None:
        """Raises ClusterFailed if the cluster has ended."""
        try:
            self._cluster.check()
        except ClusterFailed as exc:
            raise ClusterFailed("\n".join([f"{exc}; its last lines:", *self.notices()])) from exc

    def _read(self, file: int) -> None:
        """Reads what the cluster writes until it has ended."""
        more = True
        while more:
            _is_readable(file)
            with self._reading:
                more = not _is_readable(file, 0) or self._take(file)
        os.close(file)

    def _take(self, file: int) -> bool:
        """Reads from ``file`` once, shows what comes until the cluster is ready, and returns whether more may come."""
        data = b""
        with suppress(OSError):  # which a terminal raises when nobody has its other end
            data = os.read(file, _READ_BYTES)
        if self._is_ready:
            self._lines = (self._lines + data)[-_READ_BYTES:]
        else:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), data)
        return bool(data)


def _is_readable(file: int, within_ms: int | None = None) -> bool:
    """Returns whether something can be read from ``file``, or its end, within this time, by default whenever it is."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(within_ms))


_DESCRIPTION = (
    "pdserve chat MODEL starts a cluster on this machine as 'pdserve up' does, talks to it, and ends it. pdserve chat "
    "URL talks to a server that runs. Where the input is no terminal, it is one message, and the answer is printed."
)
_ADDRESS = re.compile(r"https?://.*|(localhost|\d+\.\d+\.\d+\.\d+|\[[\da-fA-F:]+\]):\d+(/.*)?")
_MAX_MESSAGE_BYTES = 16 * 2**20


def chat_flags(argv: Sequence[str]) -> list[str]:
    """Returns ``argv`` with a leading model or URL, and a question, replaced by the flags that they stand for."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    flags = ("--url" if words and _ADDRESS.fullmatch(words[0]) else "--model", "--ask")
    if len(words) > len(flags):
        raise ConfigError(f"unexpected {words[len(flags)]!r}; only {' and '.join(flags)} may stand without their flags")
    return [part for pair in zip(flags, words, strict=False) for part in pair] + list(argv[len(words) :])


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Talks until the user has enough, or until the one message is answered; returns the exit status.

    Raises ConfigError, AskFailed if the server does not answer the one message or is not there, and ClusterFailed.
    """
    config, file = load_with_file(ChatConfig, chat_flags(argv), environ, prog="pdserve chat", description=_DESCRIPTION)
    with ended_in_order(), _interrupted_by_ctrl_c():
        try:
            url = base_url(config.talk.url) if config.talk.url else ""
            question = config.cluster.ask or ("" if _in_terminal() else _standard_input())
            if url:
                trust = Trust(read_authorities(config.trust.authorities))
                tls = trust.context if url.startswith("https:") else None
                access = Access(_key(config.talk), tls, config.request.timeout_s)
                return _talk(config, environ, question, url, access, lambda: ())
            return _talk_to_own(config, environ, question, file)
        except BrokenPipeError:
            # Whoever reads has enough. What Python still holds back for them goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


def base_url(given: str) -> str:
    """Returns the address of a server without what follows it. Raises ConfigError if it is none."""
    url = given if "://" in given else f"http://{given}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url: {given!r} was given; it takes a URL like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _key(talk: TalkConfig) -> str:
    if talk.api_keys:
        return talk.api_keys[0]
    keys = read_api_keys(AdmissionConfig(api_key_file=talk.api_key_file))
    return keys[0].key if keys else ""


@contextmanager
def _interrupted_by_ctrl_c() -> Iterator[None]:
    """In a terminal, SIGINT is Ctrl-C, also where whoever started this program ignores it."""
    if not _in_terminal():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _talk_to_own(config: ChatConfig, environ: Mapping[str, str], question: str, file: str) -> int:
    # These are needed without a URL alone, and load what a cluster needs.
    from pdserve.cli.chat.terminal import keys_not_shown
    from pdserve.cli.up.command import api_key, proxy_tls
    from pdserve.hub.finding import known_model

    if config.model.path:
        known_model(config.model, environ)  # a name that means nothing is refused here, in one sentence
    inner = cluster_environ(config, environ, file)
    access = Access(api_key(inner), proxy_tls(inner), config.request.timeout_s)
    cluster = OwnCluster(inner)
    with ExitStack() as stack:
        # What is typed meanwhile is for the prompt.
        with keys_not_shown() if sys.stdin.isatty() else nullcontext():
            stack.enter_context(cluster)

        def look() -> Sequence[str]:
            cluster.check()
            return cluster.notices()

        return _talk(config, environ, question, cluster.url, access, look)


def _in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _talk(
    config: ChatConfig,
    environ: Mapping[str, str],
    question: str,
    url: str,
    access: Access,
    look: Callable[[], Sequence[str]],
) -> int:
    talk = config.talk
    # A cluster of one's own has one model, whatever its path is called here.
    wanted = config.model.served_model_name or (config.model.path if talk.url else "")
    server = asyncio.run(find_server(url, wanted, access))
    sampling = Sampling(talk.temperature, talk.max_tokens)
    conversation = Conversation(talk.system)
    if question:
        return _answer_one(server, conversation, sampling, question)

    # The modules of the terminal are not needed without one.
    from pdserve.cli.chat.terminal import ChatScreen, ChatSession, LineReader

    screen = ChatScreen(sys.stdout, colour="NO_COLOR" not in environ, markdown=talk.markdown is Switch.ON)
    reader = LineReader(state_folder(environ) / "chat-history")
    try:
        ChatSession(server, conversation, sampling, screen).run(reader, look)
    finally:
        reader.save()
    return 0


def _standard_input() -> str:
    data = sys.stdin.buffer.read(_MAX_MESSAGE_BYTES + 1)
    if len(data) > _MAX_MESSAGE_BYTES:
        raise ConfigError(f"the message on standard input has more than {_MAX_MESSAGE_BYTES // 2**20} MiB")
    try:
        text = data.decode().strip()
    except UnicodeDecodeError as exc:
        raise ConfigError("the message on standard input is not a text in UTF-8") from exc
    if not text:
        raise ConfigError("standard input is empty; it takes one message, or a terminal for a chat")
    return text


def _answer_one(server: Server, conversation: Conversation, sampling: Sampling, question: str) -> int:
    """Prints the answer to one question, and how long it took where somebody sees that."""
    answer = Answer()
    is_terminal = sys.stdout.isatty()

    def show(piece: Piece) -> None:
        if not piece.is_reasoning:
            print(printable(piece.text) if is_terminal else piece.text, end="", flush=True)

    try:
        asyncio.run(stream_answer(server, conversation.ask(question), sampling, answer, show))
    finally:
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)
    if not answer.text:
        raise AskFailed("the answer has no text")
    timeline = None
    if server.tells_nodes and answer.request_id:
        timeline = asyncio.run(read_timeline(server, answer.request_id))
    print(printable(latency_line(answer, timeline)), file=sys.stderr)
    return 0
