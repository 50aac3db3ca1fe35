"""Reads what a proxy needs at its start and again on SIGHUP: API keys, the cluster secret, and certificates."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from pdserve.config import AdmissionConfig, ProxyConfig, StatusConfig
from pdserve.control.frame import Secrets
from pdserve.errors import ConfigError, Unauthorized
from pdserve.http.tls import ServerTls, Trust, read_authorities, read_certificate
from pdserve.wire.proxy_workers import ApiKey, Credentials

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
ANONYMOUS = ""
"""The caller of every request to a proxy without API keys."""


class ApiKeys:
    """The API keys of a proxy's clients. Without any key, every client may send requests.

    Keys are looked up by a MAC under a secret of this process, so that neither the search nor the comparison takes a
    time that depends on how much of a key somebody has guessed.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._pepper = secrets.token_bytes(32)
        self.renew(keys)

    def renew(self, keys: Iterable[ApiKey]) -> None:
        """Replaces all keys by ``keys``. Requests that came with an old key go on."""
        self._keys = {self._mac(key.key): key for key in keys}

    def __bool__(self) -> bool:
        """Returns whether there is any key."""
        return bool(self._keys)

    def holds(self, authorization: str | None, api_key: str | None = None) -> bool:
        """Returns whether a request has one of the keys, in what ``caller`` takes of it. Without keys, none has."""
        try:
            return self._key(authorization, api_key) is not None
        except Unauthorized:
            return False

    def owner(self, authorization: str | None, api_key: str | None = None) -> str:
        """Returns who owns what a client keeps here. Keys of one name have one owner, and any other key is one itself.

        The arguments are as ``caller`` takes them. Raises Unauthorized.
        """
        key = self._key(authorization, api_key)
        if key is None:
            return ANONYMOUS
        return f"name:{key.caller}" if key.named else f"key:{hashlib.sha256(key.key.encode()).hexdigest()}"

    def caller(self, authorization: str | None, api_key: str | None = None) -> str:
        """Returns the owner of the key in a request's ``Authorization`` header, or else in its ``x-api-key``.

        Anthropic's clients send the second one. Raises Unauthorized.
        """
        key = self._key(authorization, api_key)
        return ANONYMOUS if key is None else key.caller

    def _key(self, authorization: str | None, api_key: str | None) -> ApiKey | None:
        """Returns the key of a request, or None if no client has one. Raises Unauthorized."""
        if not self._keys:
            return None
        if authorization is None and api_key is not None:
            authorization = f"Bearer {api_key}"
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized(
                "an API key is needed, in a header like 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="missing_api_key",
            )
        mac = self._mac(key.strip()[: MAX_KEY_CHARS + 1])
        found = self._keys.get(mac)
        if found is None:
            raise Unauthorized("the API key is not valid here", code="invalid_api_key")
        return found

    def _mac(self, key: str) -> bytes:
        return hmac.digest(self._pepper, key.encode("utf-8", "surrogateescape"), hashlib.sha256)


def read_api_keys(config: AdmissionConfig) -> tuple[ApiKey, ...]:
    """Returns the keys of ``--api-key`` and of ``--api-key-file``, whose lines are a key, or a name and a key.

    Raises ConfigError, which never shows a key.
    """
    found = [ApiKey(f"key-{number}", key) for number, key in enumerate(config.api_keys, 1)]
    if config.api_key_file:
        found += _read_key_file(Path(config.api_key_file))
        if not found:
            raise ConfigError(f"--api-key-file: there is no key in {config.api_key_file}")
    return _checked(found, "API key")


def read_admin_keys(config: StatusConfig) -> tuple[ApiKey, ...]:
    """Returns the keys of ``--admin-key-file``. Raises ConfigError, which never shows a key."""
    if not config.admin_key_file:
        return ()
    found = _read_key_file(Path(config.admin_key_file))
    if not found:
        raise ConfigError(f"--admin-key-file: there is no key in {config.admin_key_file}")
    return _checked(found, "admin key")


def _checked(found: list[ApiKey], what: str) -> tuple[ApiKey, ...]:
    for one in found:
        if not MIN_KEY_CHARS <= len(one.key) <= MAX_KEY_CHARS:
            raise ConfigError(
                f"the {what} of {one.caller} has {len(one.key)} characters; it takes {MIN_KEY_CHARS} to "
                f"{MAX_KEY_CHARS}: make one with `openssl rand -hex 24`"
            )
    if len({one.key for one in found}) < len(found):
        raise ConfigError(f"an {what} is given twice")
    return tuple(found)


def _read_key_file(path: Path) -> list[ApiKey]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as exc:
        raise ConfigError(f"cannot read the keys in {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"the keys in {path} are not text") from exc
    keys = []
    for number, line in enumerate(lines, 1):
        match line.split():
            case []:
                continue
            case [first, *_] if first.startswith("#"):
                continue
            case [key]:
                keys.append(ApiKey(f"line-{number}", key))
            case [name, key]:
                keys.append(ApiKey(name, key, named=True))
            case _:
                raise ConfigError(f"line {number} of {path} is neither a key nor a name and a key")
    return keys


def read_credentials(config: ProxyConfig, read_secret: Callable[[], bytes]) -> Credentials:
    """Returns what ``config`` names. Raises ConfigError if any of it cannot be used."""
    tls = config.tls
    return Credentials(
        secret=read_secret(),
        keys=read_api_keys(config.admission),
        certificate=read_certificate(tls.cert, tls.key) if tls.cert else None,
        authorities=read_authorities(config.trust.authorities),
        admin_keys=read_admin_keys(config.status),
    )


class LiveCredentials:
    """The credentials of one process. Everything that is made with them follows ``renew``."""

    def __init__(self, credentials: Credentials) -> None:
        """Raises ConfigError if the certificate cannot be used."""
        self.secrets = Secrets(credentials.secret)
        self.keys = ApiKeys(credentials.keys)
        self.admins = ApiKeys(credentials.admin_keys)
        self.tls = ServerTls(credentials.certificate) if credentials.certificate is not None else None
        self.trust = Trust(credentials.authorities)

    def renew(self, credentials: Credentials) -> None:
        """Replaces all credentials. Raises ConfigError, and changes nothing, if the certificate cannot be used."""
        if self.tls is not None and credentials.certificate is not None:
            self.tls.renew(credentials.certificate)
        self.secrets.renew(credentials.secret)
        self.keys.renew(credentials.keys)
        self.admins.renew(credentials.admin_keys)
        self.trust.renew(credentials.authorities)
