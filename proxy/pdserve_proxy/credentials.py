"""What a proxy reads at its start and again on SIGHUP: cluster secret, API keys, certificates."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.config import ProxyConfig
from pdserve.tls import ServerTls, Trust, read_authorities, read_certificate
from pdserve.wire.frame import Secrets
from pdserve.wire.proxy_workers import Credentials
from pdserve_proxy.api_keys import ApiKeys, read_api_keys


def read_credentials(config: ProxyConfig, read_secret: Callable[[], bytes]) -> Credentials:
    """Raises ConfigError if anything cannot be used."""
    tls = config.tls
    return Credentials(
        secret=read_secret(),
        keys=read_api_keys(config.admission),
        certificate=read_certificate(tls.cert, tls.key) if tls.cert else None,
        authorities=read_authorities(config.trust.authorities),
    )


class LiveCredentials:
    """One process's: everything that is made with them follows ``renew``."""

    def __init__(self, credentials: Credentials) -> None:
        """Raises ConfigError if the certificate cannot be used."""
        self.secrets = Secrets(credentials.secret)
        self.keys = ApiKeys(credentials.keys)
        self.tls = ServerTls(credentials.certificate) if credentials.certificate is not None else None
        self.trust = Trust(credentials.authorities)

    def renew(self, credentials: Credentials) -> None:
        """Raises ConfigError, and changes nothing, if the certificate cannot be used."""
        if self.tls is not None and credentials.certificate is not None:
            self.tls.renew(credentials.certificate)
        self.secrets.renew(credentials.secret)
        self.keys.renew(credentials.keys)
        self.trust.renew(credentials.authorities)
