"""Loads UCX through ucxx, which brings or finds it, and asks UCX which transports and devices it uses."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from typing import Any


def load_ucxx() -> Any:
    """Returns ucxx's module of UCX objects. Raises ImportError or OSError if there is none."""
    # ucxx sets variables that this UCX does not use, and UCX would warn of them on stderr. The first variable prevents
    # that, so the import must come after it. The others keep a peer's death off stderr, since it is in our own log.
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCXX_LOG_LEVEL", "fatal")
    from ucxx._lib import libucxx

    return libucxx


SHARED_MEMORY = frozenset({"posix", "sysv", "xpmem"})
"""The transports between processes that share memory."""

LIBUCP = "libucp.so.0"
_FIELD_TRANSPORTS = 1 << 3
_MAX_LANES = 32


@dataclass(frozen=True, slots=True)
class Lane:
    """A transport on a device, such as ``posix`` on ``memory`` or ``tcp`` on ``eth0``."""

    transport: str
    device: str


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
