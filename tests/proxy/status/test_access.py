"""Who sees the status and who commands: keys, addresses, and what pages of other origins have a browser send."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.config import HttpConfig, StatusConfig, StatusPage
from pdserve.errors import ConfigError, Forbidden, Unauthorized
from pdserve.wire.proxy_workers import ApiKey, Credentials
from pdserve_proxy.credentials import ApiKeys, LiveCredentials, read_admin_keys
from pdserve_proxy.status.access import StatusAccess

KEY, ADMIN_KEY = "a-key-of-a-client", "a-key-of-an-admin"
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
HERE = {"host": "127.0.0.1:8000"}
AWAY = {"host": "pdserve.example.com"}


def access(
    host: str = LOOPBACK, page: StatusPage = StatusPage.AUTO, *, keys: bool = False, admins: bool = False
) -> StatusAccess:
    clients = ApiKeys([ApiKey("client", KEY)] if keys else [])
    return StatusAccess(page, HttpConfig(host=host), clients, ApiKeys([ApiKey("ada", ADMIN_KEY)] if admins else []))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("host", "page", "keys", "admins", "shown"),
    [
        (LOOPBACK, StatusPage.AUTO, False, False, True),
        (EVERYWHERE, StatusPage.AUTO, False, False, False),
        (EVERYWHERE, StatusPage.AUTO, True, False, True),
        (EVERYWHERE, StatusPage.AUTO, False, True, True),
        (EVERYWHERE, StatusPage.ON, False, False, True),
        (LOOPBACK, StatusPage.OFF, True, True, False),
    ],
)
def test_the_page_is_shown(host: str, page: StatusPage, keys: bool, admins: bool, shown: bool) -> None:
    assert access(host, page, keys=keys, admins=admins).shown is shown


def test_on_loopback_without_keys_everybody_there_may_see_it() -> None:
    for host in ("127.0.0.1:8000", "localhost:8000", "localhost.:8000", "LOCALHOST", "[::1]:8000"):
        assert access().check_viewer({"host": host}) is False


@pytest.mark.parametrize(
    "host",
    ["evil.example.com:8000", "127.0.0.1.evil.example.com", "", "[", "localhost.evil.com", "evil.com@127.0.0.1", "."],
)
def test_a_name_that_leads_to_loopback_shows_nothing(host: str) -> None:
    with pytest.raises(Forbidden, match="names of loopback"):
        access().check_viewer({"host": host})


@pytest.mark.parametrize(
    "sent",
    [
        {"origin": "https://evil.example.com"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "cross-site"},
    ],
)
def test_pages_of_other_origins_get_nothing(sent: dict[str, str]) -> None:
    """Not even with an admin's key: no page has a use for one but our own."""
    rules = access(admins=True)
    for check in (rules.check_viewer, rules.check_admin):
        with pytest.raises(Forbidden, match="other origins"):
            check({**HERE, **bearer(ADMIN_KEY), **sent})


def test_the_own_page_is_let_in() -> None:
    for sent in ({"origin": "http://127.0.0.1:8000"}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
        assert access(admins=True).check_viewer({**HERE, **bearer(ADMIN_KEY), **sent}) is True
        assert access(admins=True).check_admin({**HERE, **bearer(ADMIN_KEY), **sent}) == "ada"


def test_where_there_are_keys_one_is_needed_also_on_loopback() -> None:
    for rules, headers in ((access(keys=True), HERE), (access(EVERYWHERE, keys=True), AWAY)):
        for sent in ({}, bearer("a-wrong-key-of-nobody")):
            with pytest.raises(Unauthorized):
                rules.check_viewer({**headers, **sent})
        assert rules.check_viewer({**headers, **bearer(KEY)}) is False
        assert rules.check_viewer({**headers, "x-api-key": KEY}) is False


@pytest.mark.parametrize("page", [StatusPage.AUTO, StatusPage.ON])
def test_where_there_are_admins_no_client_sees_the_others_requests(page: StatusPage) -> None:
    for host, headers in ((LOOPBACK, HERE), (EVERYWHERE, AWAY)):
        rules = access(host, page, keys=True, admins=True)
        for sent in (bearer(KEY), {"x-api-key": KEY}, {}, {"x-api-key": ADMIN_KEY}, bearer("a-wrong-key-of-nobody")):
            with pytest.raises(Unauthorized, match=r"an admin's key .* is needed .* 'Authorization: Bearer KEY'"):
                rules.check_viewer({**headers, **sent})
        assert rules.check_viewer({**headers, **bearer(ADMIN_KEY)}) is True


def test_away_from_loopback_without_keys_of_clients_an_admin_may_see_it() -> None:
    rules = access(EVERYWHERE, admins=True)
    with pytest.raises(Unauthorized):
        rules.check_viewer(AWAY)
    assert rules.check_viewer({**AWAY, **bearer(ADMIN_KEY)}) is True
    assert access(EVERYWHERE, StatusPage.ON, admins=True).check_viewer(AWAY) is False


def test_admin_keys_are_read_again_with_the_others(tmp_path: Path) -> None:
    file = tmp_path / "admins"
    config = StatusConfig(admin_key_file=str(file))
    for content, why in (("", "there is no key"), ("ada short", "admin key of ada has 5 characters")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=why):
            read_admin_keys(config)
    file.write_text(f"# those who may drain\nada {ADMIN_KEY}\n")
    live = LiveCredentials(Credentials(b"s" * 32, (), admin_keys=read_admin_keys(config)))
    rules = StatusAccess(StatusPage.AUTO, HttpConfig(host=EVERYWHERE), live.keys, live.admins)
    assert rules.check_admin({**AWAY, **bearer(ADMIN_KEY)}) == "ada"
    live.renew(Credentials(b"s" * 32, ()))
    assert not rules.shown
    with pytest.raises(Forbidden):
        rules.check_admin({**AWAY, **bearer(ADMIN_KEY)})


def test_only_an_admin_commands() -> None:
    rules = access(keys=True, admins=True)
    for sent in ({}, bearer(KEY), {"x-api-key": ADMIN_KEY}, {"cookie": f"key={ADMIN_KEY}"}):
        with pytest.raises(Unauthorized):
            rules.check_admin({**HERE, **sent})
    with pytest.raises(Forbidden, match="--admin-key-file"):
        access(keys=True).check_admin({**HERE, **bearer(KEY)})
