"""``pdserve chat`` talks to a model in the terminal."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from urllib.parse import urlsplit

from pdserve.cli.chat.conversation import Conversation
from pdserve.cli.chat.server import (
    Access,
    Answer,
    AskFailed,
    Piece,
    Sampling,
    Server,
    find_server,
    latency_line,
    read_timeline,
    stream_answer,
)
from pdserve.cli.node_commands import leading_flags
from pdserve.config import AdmissionConfig, ChatConfig, Switch, TalkConfig
from pdserve.errors import ConfigError
from pdserve.http.tls import Trust, read_authorities
from pdserve.printable import printable
from pdserve.settings import load_with_file, state_folder
from pdserve_proxy.credentials import read_api_keys

_DESCRIPTION = (
    "pdserve chat MODEL starts a cluster on this machine as 'pdserve up' does, talks to it, and ends it. pdserve chat "
    "URL talks to a server that runs. Where the input is no terminal, it is one message, and the answer is printed."
)
_ADDRESS = re.compile(r"https?://.*|(localhost|\d+\.\d+\.\d+\.\d+|\[[\da-fA-F:]+\]):\d+(/.*)?")
_MAX_MESSAGE_BYTES = 16 * 2**20


def chat_flags(argv: Sequence[str]) -> list[str]:
    """Returns ``argv`` with a leading model or URL, and a question, replaced by the flags that they stand for."""
    first = argv[0] if argv else ""
    return leading_flags(argv, ("--url" if _ADDRESS.fullmatch(first) else "--model", "--ask"))


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Talks until the user has enough, or until the one message is answered; returns the exit status.

    Raises ConfigError, AskFailed if the server does not answer the one message or is not there, and ClusterFailed.
    """
    config, file = load_with_file(ChatConfig, chat_flags(argv), environ, prog="pdserve chat", description=_DESCRIPTION)
    with _ended_in_order():
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
def _ended_in_order() -> Iterator[None]:
    """Has SIGTERM and SIGHUP end the block as an exception, so that the cluster and the terminal are put in order.

    In a terminal, SIGINT is Ctrl-C, also where whoever started this program ignores it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    if _in_terminal():
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _talk_to_own(config: ChatConfig, environ: Mapping[str, str], question: str, file: str) -> int:
    # These are needed without a URL alone, and load what a cluster needs.
    from pdserve.cli.chat.cluster import OwnCluster, cluster_environ
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
