"""TLS: what an HTTPS server shows, and whom an HTTPS client trusts. Both can change while connections stand."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM: a certificate with its chain, and its private key."""

    chain: bytes
    key: bytes = field(repr=False)


def read_certificate(chain: str, key: str) -> Certificate:
    """Reads a certificate from its two files. Raises ConfigError if they cannot be used."""
    found = Certificate(_read(chain), _read(key))
    _server_context(found, f"{chain} and {key}")
    return found


class ServerTls:
    """TLS 1.2 and above, with a certificate that can be replaced."""

    def __init__(self, certificate: Certificate) -> None:
        """Raises ConfigError if ``certificate`` cannot be used."""
        self.context = _server_context(certificate, "the certificate")
        self._now = self.context
        # Into the same context an RSA certificate and an ECDSA one would both go, and clients would choose.
        self.context.sni_callback = self._choose

    def renew(self, certificate: Certificate) -> None:
        """Has later handshakes use ``certificate``. Raises ConfigError, and changes nothing, if it cannot be used."""
        self._now = _server_context(certificate, "the certificate")

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Gives a handshake the newest context. OpenSSL calls it in each, whether or not the client says a name."""
        connection.context = self._now


class Trust:
    """The certificate authorities that servers are checked against: some in PEM, or else the system's."""

    def __init__(self, authorities: bytes = b"") -> None:
        self._authorities = authorities
        self._context: ssl.SSLContext | None = None

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS context, which is made when it is needed first: the system has hundreds of authorities."""
        if self._context is None:
            self._context = _client_context(self._authorities)
        return self._context

    def renew(self, authorities: bytes) -> None:
        """Has connections that are made later be checked against ``authorities``."""
        if authorities != self._authorities:
            self._authorities, self._context = authorities, None


def read_authorities(file: str) -> bytes:
    """Returns what ``Trust`` takes; empty if ``file`` is. Raises ConfigError if ``file`` cannot be used."""
    if not file:
        return b""
    found = _read(file)
    try:
        usable = bool(found.strip()) and _client_context(found).cert_store_stats()["x509"] > 0
    except (ssl.SSLError, ValueError) as exc:
        raise ConfigError(f"TLS: {file} is no PEM file of certificate authorities: {exc}") from exc
    if not usable:
        raise ConfigError(f"TLS: there is no certificate of an authority in {file}")
    return found


def trusting_only(chain: str) -> ssl.SSLContext:
    """Returns a client's context that trusts only the certificate in the file ``chain``, whatever name it is for.

    Raises ConfigError if the file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=_read(chain).decode("ascii"))
    except (ssl.SSLError, ValueError) as exc:
        raise ConfigError(f"TLS: {chain} is no PEM file of a certificate: {exc}") from exc
    return context


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as exc:
        raise ConfigError(f"TLS: cannot read the file {file!r}: {exc.strerror}") from exc


def _client_context(authorities: bytes) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authorities.decode("ascii") or None)


def _server_context(certificate: Certificate, what: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    with ExitStack() as files:
        chain, key = (files.enter_context(_file_of(pem)) for pem in (certificate.chain, certificate.key))
        try:
            # A passphrase would be asked for on the terminal; there may be none.
            context.load_cert_chain(chain, key, password="")
        except (OSError, ssl.SSLError, ValueError) as exc:
            raise ConfigError(f"TLS: {what} cannot be used: {exc}") from exc
    return context


@contextmanager
def _file_of(data: bytes) -> Iterator[str]:
    """Yields the path of a file in memory with ``data``: Python takes certificates from files alone."""
    descriptor = os.memfd_create("pem")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
