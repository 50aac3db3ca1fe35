"""Tests where the cluster secret comes from, and which commands may do without one."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from pdserve.config import SecurityConfig
from pdserve.errors import ConfigError
from pdserve.settings import is_loopback, resolve_secret

LOOPBACK = ["127.0.0.1", "localhost", "::1"]


def test_a_given_secret_is_taken(tmp_path: Path) -> None:
    given = "0123456789abcdef"
    assert resolve_secret(SecurityConfig(secret=given), ["0.0.0.0"], tmp_path) == given.encode()
    file = tmp_path / "its-file"
    file.write_text(given + "\n")
    assert resolve_secret(SecurityConfig(secret_file=str(file)), ["0.0.0.0"], tmp_path) == given.encode()
    assert not (tmp_path / "secret").exists()


def test_a_short_secret_is_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="15 characters; at least 16") as caught:
        resolve_secret(SecurityConfig(secret="0123456789abcde"), [], tmp_path)
    assert "0123456789" not in str(caught.value)


@pytest.mark.parametrize("content", ["{0}\n{1}\n", "\n{0} \r\n\n {1}"])
def test_two_secrets_are_two_lines(tmp_path: Path, content: str) -> None:
    both = ("0123456789abcdef", "fedcba9876543210")
    file = tmp_path / "its-file"
    file.write_text(content.format(*both))
    assert resolve_secret(SecurityConfig(secret_file=str(file)), [], tmp_path) == "\n".join(both).encode()
    assert resolve_secret(SecurityConfig(secret=content.format(*both)), [], tmp_path) == "\n".join(both).encode()


@pytest.mark.parametrize("content", ["0123456789abcdef\nshort", "\n", "0123456789abcdef\n" * 3])
def test_each_of_them_has_to_be_long_enough_and_two_are_the_most(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"at least 16|it takes one secret, or two") as caught:
        resolve_secret(SecurityConfig(secret=content), [], tmp_path)
    assert "0123456789" not in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the secret file /nowhere"):
        resolve_secret(SecurityConfig(secret_file="/nowhere"), [], tmp_path)


def test_loopback_gets_the_users_own_secret_made_once_for_the_user_alone(tmp_path: Path) -> None:
    state = tmp_path / "state" / "pdserve"
    first = resolve_secret(SecurityConfig(), LOOPBACK, state)
    assert len(first) >= 64
    assert resolve_secret(SecurityConfig(), LOOPBACK, state) == first
    assert stat.S_IMODE((state / "secret").stat().st_mode) == 0o600
    assert [path.name for path in state.iterdir()] == ["secret"]


def test_all_who_start_at_once_get_the_same_secret(tmp_path: Path) -> None:
    found: list[bytes] = []
    barrier = threading.Barrier(8, timeout=30)

    def start() -> None:
        barrier.wait()
        found.append(resolve_secret(SecurityConfig(), LOOPBACK, tmp_path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    resolve_secret(SecurityConfig(), LOOPBACK, tmp_path)
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        resolve_secret(SecurityConfig(), LOOPBACK, tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-1.example"])
def test_beyond_loopback_a_secret_is_needed_and_the_way_to_one_is_told(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand -hex 32") as caught:
        resolve_secret(SecurityConfig(), ["127.0.0.1", host], tmp_path)
    assert host in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("", False),
        ("*", False),
        ("localhost.example", False),
        ("192.168.1.1", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
