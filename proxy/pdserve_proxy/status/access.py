"""Says who may see the cluster's status, and who may command nodes from there.

Browsers send what any page asks them to, to any server, this one on loopback included. So what is shown without a key
is shown on loopback, under loopback's own names: a page whose name leads to 127.0.0.1 (DNS rebinding) has another name
in ``Host``. No page of another origin gets anything, whatever ``--cors-origins`` says. A command needs an admin key in
``Authorization``, which browsers never send by themselves. Where there are clients with keys and admins, what is shown
of all clients' requests is for admins alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from pdserve.config import HttpConfig, StatusPage
from pdserve.errors import Forbidden, Unauthorized
from pdserve.settings import is_loopback
from pdserve_proxy.credentials import ApiKeys

Headers = Mapping[str, str]
"""The header fields of a request, by names in lower case."""


class StatusAccess:
    """The rules of one proxy. They follow its keys, which may change."""

    def __init__(self, page: StatusPage, http: HttpConfig, keys: ApiKeys, admins: ApiKeys) -> None:
        self._page = page
        self._on_loopback = is_loopback(http.host)
        self._keys = keys
        self._admins = admins

    @property
    def shown(self) -> bool:
        """Whether anybody may see the status."""
        if self._page is StatusPage.AUTO:
            return self._on_loopback or bool(self._keys or self._admins)
        return self._page is StatusPage.ON

    @property
    def commands(self) -> bool:
        """Whether there is an admin."""
        return bool(self._admins)

    def check_viewer(self, headers: Headers) -> bool:
        """Returns whether a request is an admin's. Raises Unauthorized or Forbidden if its sender may see nothing."""
        _check_origin(headers)
        if check_watcher(self._keys, self._admins, headers.get("authorization"), headers.get("x-api-key")):
            return True
        if self._keys:
            return False
        if self._page is StatusPage.AUTO and not self._on_loopback:
            raise Unauthorized("an admin's key is needed to see the status", code="missing_admin_key")
        if self._on_loopback:
            check_loopback_name(headers.get("host", ""), "the status")
        return False

    def check_admin(self, headers: Headers) -> str:
        """Returns the name of the admin who sent a request. Raises Unauthorized or Forbidden if it is none."""
        _check_origin(headers)
        if not self._admins:
            raise Forbidden("nobody may command nodes here: the proxy has no --admin-key-file", code="no_admins")
        return self._admins.caller(headers.get("authorization"))


def check_watcher(keys: ApiKeys, admins: ApiKeys, authorization: str | None, api_key: str | None) -> bool:
    """Returns whether a request with these headers is an admin's.

    Raises Unauthorized for one that has no key where there are keys, and for a client's, who would see the others'
    requests, where there are admins.
    """
    if admins.holds(authorization):
        return True
    if keys and admins:
        raise Unauthorized(
            "an admin's key (--admin-key-file) is needed to see the requests of all clients, in the header "
            "'Authorization: Bearer KEY'",
            code="missing_admin_key",
        )
    keys.caller(authorization, api_key)
    return False


def _check_origin(headers: Headers) -> None:
    """Raises Forbidden for a request that a page of another origin has made."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if site is not None:
        own = site in ("none", "same-origin")
    else:  # not a browser, an old one, or one that came by plain HTTP over a network
        own = origin is None or _host_of(origin) == headers.get("host", "")
    if not own:
        raise Forbidden("pages of other origins may not see the status", code="other_origin")


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def check_loopback_name(given: str, what: str) -> None:
    """Raises Forbidden if a request for ``what`` was sent to ``given``, which is not a name of loopback's own."""
    try:
        host = (urlsplit(f"//{given}").hostname or "").removesuffix(".")
    except ValueError:
        host = ""
    if "@" in given or not is_loopback(host):
        raise Forbidden(
            f"without a key, {what} is shown under the names of loopback only: http://127.0.0.1 or http://localhost. "
            "A reverse proxy in front of this one has to rewrite Host, or to send a key of this proxy",
            code="other_host",
        )
