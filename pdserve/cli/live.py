"""``pdserve live`` asks the server that another process is, in a container process 1, whether it lives.

An image's health check knows neither the role nor the port that its container was started with. The server's command
line and the environment that both share say them.
"""

from __future__ import annotations

import http.client
import ipaddress
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import LiveConfig, NodeConfig, ProxyConfig, UpConfig
from pdserve.errors import ConfigError, PdserveError
from pdserve.http.tls import trusting_only
from pdserve.settings import load
from pdserve.wire.discovery import Role

ROUTE = "/live"
_DESCRIPTION = (
    "Asks the server that a process of this machine or container is for GET /live. Exit status 0 if it answers 200, "
    "and 1 if it does not."
)
_ROOTS: dict[str, type[ProxyConfig | UpConfig | NodeConfig]] = {
    "up": UpConfig,
    "serve": UpConfig,
    "proxy": ProxyConfig,
    **{role.value: NodeConfig for role in Role},
}


class NotLive(PdserveError):
    """The server does not answer as one that lives."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server of this machine is asked."""

    host: str
    port: int
    certificate: str
    """The file of the certificate with which it serves HTTPS; empty if it serves HTTP."""


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns 0 if the server lives. Raises NotLive if it does not, and ConfigError."""
    config = load(LiveConfig, argv, environ, prog="pdserve live", description=_DESCRIPTION).live
    try:
        command_line = Path(f"/proc/{config.pid}/cmdline").read_bytes()
    except OSError as exc:
        raise NotLive(f"there is no process {config.pid} whose command line can be read: {exc.strerror}") from exc
    words = [word.decode(errors="replace") for word in command_line.split(b"\0")[:-1]]
    ask(server_address(words, environ), config.wait_s)
    return 0


def server_address(words: Sequence[str], environ: Mapping[str, str]) -> ServerAddress:
    """Returns where the server with this command line and ``environ`` listens. Raises NotLive and ConfigError."""
    programs = [at for at, word in enumerate(words[:-1]) if Path(word).name == "pdserve" and words[at + 1] in _ROOTS]
    if not programs:
        raise NotLive(f"this process is none of pdserve {', '.join(_ROOTS)}: {words[0] if words else ''}")
    subcommand, *flags = words[programs[0] + 1 :]
    config = load(_ROOTS[subcommand], flags, environ, prog=f"pdserve {subcommand}")
    if not config.http.port:
        raise ConfigError(f"pdserve {subcommand} serves at a port that the system chose: give it one with --port")
    proxy = load(ProxyConfig, [], environ, prog="pdserve proxy") if isinstance(config, UpConfig) else config
    certificate = proxy.tls.cert if isinstance(proxy, ProxyConfig) else ""
    return ServerAddress(_reachable(config.http.host), config.http.port, certificate)


def _reachable(host: str) -> str:
    """Returns where a server that listens at ``host`` is reached from here."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def ask(server: ServerAddress, wait_s: float) -> None:
    """Raises NotLive if the server does not answer that it lives within ``wait_s``."""
    connection = (
        http.client.HTTPSConnection(server.host, server.port, timeout=wait_s, context=trusting_only(server.certificate))
        if server.certificate
        else http.client.HTTPConnection(server.host, server.port, timeout=wait_s)
    )
    where = f"{server.host} port {server.port}"
    try:
        connection.request("GET", ROUTE)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException, ssl.SSLError) as exc:
        raise NotLive(f"the server at {where} does not answer: {exc or type(exc).__name__}") from exc
    finally:
        connection.close()
    if status != http.HTTPStatus.OK:
        raise NotLive(f"the server at {where} answers GET {ROUTE} with status {status}")
