"""Tells an operator of addresses that a node tells others and that only its own machine reaches."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from pdserve.settings import is_loopback
from pdserve.wire.discovery import NodeInfo


def out_of_reach(node: NodeInfo, proxies: Sequence[str]) -> list[str]:
    """Returns a warning for each address of the node on loopback, if a proxy has an address that is not there."""
    elsewhere = [proxy for proxy in proxies if not is_loopback(_host(proxy))]
    if not elsewhere:
        return []
    found = []
    if is_loopback(_host(node.url)):
        found.append(
            f"proxies will send requests to {node.url}, which only this machine reaches, and {elsewhere[0]} may be on "
            "another: give --host (0.0.0.0 is all addresses), and --advertise if they know this machine by another name"
        )
    if node.role.prefills and is_loopback(_host(node.control)):
        found.append(
            f"decode nodes will fetch KV blocks from {node.control}, which only this machine reaches: give "
            "--transfer-host, and --transfer-advertise if they know this machine by another name"
        )
    return found


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""
