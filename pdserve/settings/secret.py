"""The cluster secret: given by the user, or on one machine the user's own, created at first use.

While the secret is being replaced there are two, one on each line. Processes sign with the first and accept both.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from pdserve.config import SecurityConfig
from pdserve.errors import ConfigError
from pdserve.machine.file_system import OTHERS_ALL, check_own

MIN_SECRET_CHARS = 16
MAX_SECRETS = 2

_HOW = "make one with `openssl rand -hex 32` for all processes of the cluster, as PDSERVE_SECRET or --secret-file"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``.

    A name other than ``localhost`` is not looked up: it counts as one that other machines can reach.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def resolve_secret(security: SecurityConfig, binds: Sequence[str], state_dir: Path) -> bytes:
    """Returns the secret that this process signs with, and in a second line another one that it accepts.

    The secret comes from ``--secret``, else from ``--secret-file``, else, if every host of ``binds`` is loopback, from
    ``state_dir/secret``, which is created if it does not exist. Raises ConfigError if there is none or it is too short.
    """
    if security.secret:
        return _checked(security.secret, "--secret / PDSERVE_SECRET")
    if security.secret_file:
        return _checked(_read(Path(security.secret_file)), f"the secret in {security.secret_file}")
    beyond = [host for host in binds if not is_loopback(host)]
    if beyond:
        raise ConfigError(
            f"a cluster secret is needed to listen on {beyond[0]}, which other machines can reach: {_HOW}"
        )
    return _own_secret(state_dir / "secret")


def _checked(text: str, what: str) -> bytes:
    lines = [line for line in map(str.strip, text.splitlines()) if line] or [""]
    if len(lines) > MAX_SECRETS:
        raise ConfigError(f"{what} has {len(lines)} lines; it takes one secret, or two while one replaces the other")
    shortest = min(map(len, lines))
    if shortest < MIN_SECRET_CHARS:
        raise ConfigError(f"{what} has {shortest} characters; at least {MIN_SECRET_CHARS} are needed: {_HOW}")
    return "\n".join(lines).encode()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise ConfigError(f"cannot read the secret file {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"the secret file {path} is not text: {_HOW}") from exc


def _own_secret(path: Path) -> bytes:
    try:
        if not path.exists():
            _create(path)
        found = path.stat()
    except OSError as exc:
        raise ConfigError(f"cannot keep a secret in {path}: {exc.strerror}; {_HOW}") from exc
    try:
        check_own(found, OTHERS_ALL)
    except PermissionError as exc:
        raise ConfigError(
            f"{path} has to belong to you and be readable by you alone: chmod 600 it, or delete it ({exc.strerror})"
        ) from exc
    return _checked(_read(path), f"the secret in {path}")


def _create(path: Path) -> None:
    """Puts a new secret at ``path``, whole or not at all. A secret that another process puts there first stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            # A link, unlike a rename, never replaces the secret that another process has already started with.
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
