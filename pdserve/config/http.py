"""How servers listen, stream and protect what they send: HTTP, TLS and the cluster secret."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config.declare import Switch, setting


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP server."""

    host: str = setting("host", "The server listens on this address.", "127.0.0.1", first=True)
    port: int = setting(
        "port", "The server listens on this port. 0 takes a free one.", 0, minimum=0, maximum=65535, first=True
    )
    advertise: str = setting(
        "advertise",
        "The proxy reaches this server at this URL. Empty: host and port, with this machine's name if the host means "
        "all addresses.",
        "",
    )
    keep_alive_s: int = setting(
        "keep-alive-s",
        "An idle client connection is closed after this many seconds. Keep it longer than clients' connection pools "
        "do.",
        120,
        minimum=1,
        maximum=86_400,
    )
    max_client_connections: int = setting(
        "max-client-connections",
        "The server has at most this many connections at once, and refuses more with 503.",
        16_384,
        minimum=1,
    )
    write_timeout_s: float = setting(
        "write-timeout-s",
        "A client that takes nothing of a response for this many seconds is cut off.",
        60.0,
        minimum=0.1,
        maximum=86_400,
    )
    cors_origins: tuple[str, ...] = setting(
        "cors-origins",
        "Web pages of these origins may send requests, for example https://chat.example.com. '*' allows all; other "
        "pages are refused.",
        (),
        first=True,
    )
    max_body_bytes: int = setting(
        "max-body-bytes", "A request body has at most this many bytes.", 8 * 2**20, minimum=1024
    )
    drain_s: float = setting(
        "drain-s", "On SIGTERM, running requests get this many seconds to finish.", 10.0, minimum=0, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """The way of tokens from a node's engine to its clients.

    Each part can be turned off, to measure what it gains.
    """

    batched_dispatch: Switch = setting(
        "batched-dispatch", "The engine sends one message a step. 'off' sends one for each token.", Switch.ON
    )
    notify_size: int = setting(
        "batch-notify-size",
        "This many requests are woken before others get a turn. 0 wakes all requests of a step at once.",
        16,
        minimum=0,
    )
    fast_path: Switch = setting(
        "sse-fast-path",
        "Plain chunks are written from encoded parts. 'off' builds each chunk as an object, to see what this gains.",
        Switch.ON,
    )
    interval: int = setting(
        "stream-interval",
        "A chunk of a stream has this many tokens. More take less work and make streams less smooth.",
        1,
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS towards clients."""

    cert: str = setting(
        "tls-cert", "This PEM file has the certificate and its chain. With it, the proxy serves HTTPS.", "", first=True
    )
    key: str = setting(
        "tls-key", "This PEM file has the certificate's private key, without a passphrase.", "", first=True
    )


@dataclass(frozen=True, slots=True)
class TrustConfig:
    """TLS towards nodes and proxies."""

    authorities: str = setting(
        "tls-ca", "This PEM file has the authorities for https:// nodes and proxies. Empty: the system's.", ""
    )


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """The cluster secret, which signs control messages."""

    secret: str = setting(
        "secret",
        "The cluster secret. Better set PDSERVE_SECRET or --secret-file: others can see command lines.",
        "",
        secret=True,
    )
    secret_file: str = setting("secret-file", "This file holds the cluster secret.", "", first=True)
