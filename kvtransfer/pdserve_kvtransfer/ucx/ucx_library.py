"""Loads UCX through ucxx, says which library that was, and asks UCX which transports and devices it uses.

ucxx loads the UCX of the package libucx or, if ``RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY`` is set, the one that the
system's loader finds. What the loader does not find comes from the package after all, without a word; ``load_ucxx``
refuses that.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pdserve.errors import TransferError
from pdserve.wire.discovery import TransportKind

PREFER_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
_MAPS = Path("/proc/self/maps")
_LIBRARY = re.compile(r"(?P<folder>/.*)/(?P<name>libuc(?:s|s_signal|m|t|p)\.so)[.0-9]*(?: \(deleted\))?")
_VERBS = "libuct_ib.so"


@dataclass(frozen=True, slots=True)
class LoadedUcx:
    """The UCX library that this process has loaded."""

    version: str
    folder: Path
    """The folder of ``libucp.so``, which has UCX's modules in its folder ``ucx``."""
    packaged: bool
    """Whether it is the one of the package libucx."""
    no_verbs: str = ""
    """Why it cannot use RDMA devices; empty if it can."""

    @property
    def verbs(self) -> bool:
        """Whether it can use RDMA devices, if there are any."""
        return not self.no_verbs

    @property
    def prefix(self) -> Path:
        """The folder that it was installed into, which has its programs in ``bin``."""
        return next((folder for folder in self.folder.parents if _header(folder).is_file()), self.folder.parent)

    @property
    def include(self) -> Path | None:
        """The folder of its headers, if they were installed."""
        return self.prefix / "include" if _header(self.prefix).is_file() else None

    @property
    def label(self) -> str:
        """A short name, such as ``1.21.0 package`` or ``1.21.0 system verbs``."""
        return f"{self.version} {'package' if self.packaged else 'system'}{' verbs' if self.verbs else ''}"

    def __str__(self) -> str:
        origin = "the package libucx" if self.packaged else "the system"
        verbs = "with verbs" if self.verbs else f"without verbs ({self.no_verbs})"
        return f"UCX {self.version} of {origin} in {self.folder}, {verbs}"


def _header(prefix: Path) -> Path:
    return prefix / "include" / "ucp" / "api" / "ucp.h"


def load_ucxx() -> Any:
    """Returns ucxx's module of UCX objects.

    Raises TransferError if there is none, or if UCX is not all of one library, or not of the one that was asked for.
    """
    # ucxx sets variables that this UCX does not use, and UCX would warn of them on stderr. The first variable prevents
    # that, so the import must come after it. The others keep a peer's death off stderr, since it is in our own log.
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCXX_LOG_LEVEL", "fatal")
    try:
        from ucxx._lib import libucxx
    except (ImportError, OSError) as exc:
        raise TransferError(f"UCX cannot be loaded: {exc}") from exc
    _loaded_folder()
    return libucxx


@cache
def loaded_ucx() -> LoadedUcx:
    """Returns the library that ``load_ucxx`` loads. Raises TransferError like it."""
    ucx, folder = load_ucxx(), _loaded_folder()
    version = ".".join(str(part) for part in ucx.get_ucx_version())
    try:
        ucx.UCXContext({"TLS": "self"}, feature_flags=(ucx.Feature.TAG,))
    except Exception as exc:
        raise TransferError(f"UCX {version} of {folder} cannot start: {exc}") from exc
    return LoadedUcx(version, folder, folder == _package_folder(), _why_no_verbs(folder))


def _why_no_verbs(folder: Path) -> str:
    """Says why the loaded UCX cannot use RDMA devices. A context has loaded all modules that can be loaded."""
    if not any((folder / "ucx").glob(f"{_VERBS}*")):
        return f"there is no {_VERBS}"
    if f"{folder}/ucx/{_VERBS}" not in _MAPS.read_text():
        return f"{_VERBS} cannot be loaded: see ldd {folder}/ucx/{_VERBS}"
    return ""


@cache
def _loaded_folder() -> Path:
    prefers_system = os.environ.get(PREFER_SYSTEM, "false").lower() != "false"
    return one_folder(_MAPS.read_text().splitlines(), _package_folder(), prefers_system=prefers_system)


def _package_folder() -> Path | None:
    spec = importlib.util.find_spec("libucx")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]).resolve() / "lib" if places else None


def one_folder(maps: Iterable[str], package: Path | None, *, prefers_system: bool) -> Path:
    """Returns the folder that all UCX libraries of a process come from. ``maps`` has the lines of ``/proc/PID/maps``.

    Raises TransferError if there are several, or none, or if ``package`` was not to be it.
    """
    folders: dict[Path, set[str]] = {}
    for line in maps:
        if found := _LIBRARY.fullmatch(line.split(maxsplit=5)[-1]):
            folders.setdefault(Path(found["folder"]), set()).add(found["name"])
    if len(folders) > 1:
        each = "; ".join(f"{', '.join(sorted(names))} of {folder}" for folder, names in sorted(folders.items()))
        raise TransferError(
            f"two UCX libraries are loaded, and parts of both would run: {each}. With {PREFER_SYSTEM} the loader "
            "has to find libucs.so, libucs_signal.so, libuct.so and libucp.so, in one folder (LD_LIBRARY_PATH)"
        )
    if not folders:
        raise TransferError("ucxx was loaded, and no UCX library with it")
    (folder,) = folders
    if prefers_system and folder == package:
        raise TransferError(
            f"{PREFER_SYSTEM} is set, but the loader found no UCX and took that of the package: name the folder that "
            "has libucs.so and libucp.so, by these names, in LD_LIBRARY_PATH, or unset the variable"
        )
    return folder


SHARED_MEMORY = frozenset({"posix", "sysv", "xpmem"})
"""The transports between processes that share memory."""
RDMA_FAMILIES = frozenset({"rc", "ud", "dc", "ib", "srd"})
"""The names of RDMA transports, up to their first underscore."""

LIBUCP = "libucp.so.0"
_FIELD_TRANSPORTS = 1 << 3
_MAX_LANES = 32


@dataclass(frozen=True, slots=True)
class Lane:
    """A transport on a device, such as ``posix`` on ``memory`` or ``tcp`` on ``eth0``."""

    transport: str
    device: str

    @property
    def kind(self) -> TransportKind:
        if self.transport in SHARED_MEMORY:
            return TransportKind.SHARED_MEMORY
        if self.transport.partition("_")[0] in RDMA_FAMILIES:
            return TransportKind.RDMA
        return TransportKind.TCP if self.transport == "tcp" else TransportKind.OTHER

    def __str__(self) -> str:
        return f"{self.transport} on {self.device}"


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    """``ucp_ep_attr_t``, with its ``ucp_transports_t`` in place."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_uint64 * 16),
        ("remote_sockaddr", ctypes.c_uint64 * 16),
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


def lanes_of(endpoint: int) -> tuple[Lane, ...]:
    """Returns the lanes of a living ``ucp_ep_h``, which are complete once something has gone over it.

    Returns no lanes if UCX does not tell them.
    """
    entries = (_Entry * _MAX_LANES)()
    attributes = _Attributes(
        field_mask=_FIELD_TRANSPORTS,
        entries=ctypes.cast(entries, ctypes.POINTER(_Entry)),
        num_entries=_MAX_LANES,
        entry_size=ctypes.sizeof(_Entry),
    )
    if ctypes.CDLL(LIBUCP).ucp_ep_query(ctypes.c_void_p(endpoint), ctypes.byref(attributes)) != 0:
        return ()
    found = (entries[index] for index in range(attributes.num_entries))
    return tuple(dict.fromkeys(Lane(entry.transport.decode(), entry.device.decode()) for entry in found))


def parse_resources(info: str) -> tuple[Lane, ...]:
    """Reads a context's description, which has lines like ``resource 1 : … -- tcp/eth0``."""
    found = re.findall(r"^#\s+resource .* -- (\S+?)/(\S+)$", info, re.MULTILINE)
    return tuple(Lane(transport, device) for transport, device in found)
