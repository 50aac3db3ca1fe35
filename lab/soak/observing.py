"""What the cluster's processes hold: descriptors, threads, memory, KV blocks, requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec

from lab.soak.cluster import Part, Server, SoakCluster

_QUICK = aiohttp.ClientTimeout(total=3.0)


class Held(msgspec.Struct, frozen=True):
    """What a process holds of the machine."""

    pid: int
    files: int
    sockets: int
    threads: int
    rss_mib: float
    pss_mib: float
    """Resident memory, of which pages that others have too count in part."""
    own_mib: float
    """Resident memory that is in no file: what the process has allocated."""


class Inside(msgspec.Struct, frozen=True):
    """What a server says of itself."""

    requests: float = 0
    """Requests that have not ended."""
    blocks_used: float = 0
    """The share of KV blocks in use."""
    group_blocks_used: float = 0
    """The blocks in use of windows and states."""
    blocks_quarantined: float = 0
    replayable_answers: float = 0
    journal_bytes: float = 0
    accepted_drafts: float = 0
    """Since the server started: it is no work under way."""

    @property
    def idle(self) -> bool:
        return msgspec.structs.replace(self, accepted_drafts=0) == Inside()


class Look(msgspec.Struct, frozen=True):
    """All of the cluster at one time."""

    at_s: float
    asked: int
    """The requests that had ended by then."""
    held: dict[str, Held]
    inside: dict[str, Inside]
    shared_files: int
    """The files of the cluster's shared memory."""
    temporary_files: int


_SUMMED: Mapping[str, str] = {
    "pdserve_num_requests_running": "requests",
    "pdserve_num_requests_waiting": "requests",
    "pdserve_num_requests_waiting_for_remote_kvs": "requests",
    "pdserve_proxy_requests_in_flight": "requests",
    "pdserve_kv_cache_usage_perc": "blocks_used",
    "pdserve_quarantined_blocks": "blocks_quarantined",
    "pdserve_replayable_answers": "replayable_answers",
    "pdserve_spec_decode_num_accepted_tokens_total": "accepted_drafts",
    "pdserve_proxy_journal_bytes": "journal_bytes",
}


_OF_GROUPS: Mapping[str, int] = {"pdserve_cache_group_blocks": 1, "pdserve_cache_group_free_blocks": -1}
"""Only nodes whose model has windows or states show these. All blocks less those that are free are in use."""
_OF_PROXY = frozenset(name for name in _SUMMED if name.startswith("pdserve_proxy_"))
_OF_NODE = _SUMMED.keys() - _OF_PROXY


def read_inside(metrics: str, part: Part) -> Inside | None:
    """Returns what a server's ``/metrics`` say. Only their few lines are parsed: this runs beside what it measures.

    Returns None where one of those is missing that a server of this part always shows: that is another page.
    """
    sums, seen = dict.fromkeys(Inside.__struct_fields__, 0.0), set[str]()
    for line in metrics.splitlines():
        if line.startswith("pdserve_"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name in _SUMMED:
                seen.add(name)
                sums[_SUMMED[name]] += float(value)
            elif name in _OF_GROUPS:
                sums["group_blocks_used"] += _OF_GROUPS[name] * float(value)
    return Inside(**sums) if seen >= (_OF_PROXY if part is Part.PROXY else _OF_NODE) else None


async def look(cluster: SoakCluster, session: aiohttp.ClientSession, at_s: float, asked: int) -> Look:
    """Looks at all processes. One that is gone, or does not answer, is left out."""
    inside = await asyncio.gather(*(_ask(session, server, cluster) for server in cluster.servers.values()))
    held = {
        name: found
        for server in cluster.servers.values()
        for name, pid in server.members().items()
        if (found := hold_of(pid)) is not None
    }
    said = {name: found for name, found in zip(cluster.servers, inside, strict=True) if found is not None}
    return Look(at_s, asked, held, said, _count(cluster.shared), _count(cluster.temporary))


async def _ask(session: aiohttp.ClientSession, server: Server, cluster: SoakCluster) -> Inside | None:
    url = server.url
    if not url:
        return None
    try:
        async with session.get(f"{url}/metrics", timeout=_QUICK) as response:
            return read_inside(await response.text(), server.part) if response.status == 200 else None
    except (OSError, TimeoutError, ValueError, aiohttp.ClientError):
        return None


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


def hold_of(pid: int) -> Held | None:
    """Returns what the process holds; None if it is gone."""
    folder = Path("/proc", str(pid))
    try:
        links = [_target(entry) for entry in (folder / "fd").iterdir()]
        status = _sizes(folder / "status")
        return Held(
            pid=pid,
            files=len(links),
            sockets=sum(link.startswith("socket:") for link in links),
            threads=status["Threads"],
            rss_mib=status["VmRSS"] / 1024,
            pss_mib=_sizes(folder / "smaps_rollup")["Pss"] / 1024,
            own_mib=status["RssAnon"] / 1024,
        )
    except (OSError, KeyError):
        return None


def _target(link: Path) -> str:
    with suppress(OSError):
        return os.readlink(link)
    return ""


def _sizes(path: Path) -> dict[str, int]:
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return {name: int(words[0]) for name, _, value in pairs if (words := value.split()) and words[0].isdecimal()}
