"""Makes of the settings of KV transfers what this package needs. No other module of it knows ``pdserve.config``."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pdserve.compiled_library import BuildError
from pdserve.config import Switch, TransferConfig, UcxCalls
from pdserve.errors import ConfigError
from pdserve_kvtransfer.control.sockets import loopback_only
from pdserve_kvtransfer.sides import SideSettings
from pdserve_kvtransfer.ucx.compiled_poster import PosterLibrary
from pdserve_kvtransfer.ucx.ucx_transport import MakePoster, UcxTransport
from pdserve_kvtransfer.ucx.ucxx_poster import UcxxPoster

log = logging.getLogger(__name__)

LOOPBACK_DEVICE = "lo"


def side_settings(config: TransferConfig) -> SideSettings:
    """Returns the settings of a transfer thread."""
    return SideSettings(
        lease_ms=config.lease_ms,
        heartbeat_ms=config.heartbeat_ms,
        checksums=config.checksums is Switch.ON,
        host=config.host,
        port=config.port,
        advertise=config.advertise,
    )


def chosen_poster(choice: UcxCalls, cache_dir: Path, *, digests: bool = False, registers: bool = True) -> MakePoster:
    """Returns the maker of posters, compiled now, in about a second, if that is chosen and not yet below ``cache_dir``.

    With ``digests`` a compiled poster computes the digests of landed blocks at once, while they are in a cache. With
    ``registers`` it registers its memory with the network devices as a whole.

    Raises ConfigError if compiled code was asked for by name and cannot be had; if it is only the better choice, the
    log says so.
    """
    if choice is UcxCalls.PYTHON:
        return UcxxPoster
    try:
        return PosterLibrary(cache_dir, digests, registers).poster
    except BuildError as exc:
        if choice is UcxCalls.COMPILED:
            raise ConfigError(f"--ucx-calls compiled: {exc}") from exc
        log.warning("KV blocks are posted from Python instead of compiled code, which costs less CPU time: %s", exc)
        return UcxxPoster


def bound_to_loopback(config: TransferConfig) -> bool:
    """Returns whether only this machine can reach the control channel."""
    return not config.advertise and loopback_only(config.host)


def check_rank_devices(config: TransferConfig, ranks: int) -> None:
    """Raises ConfigError if the settings name the network devices of another number of ranks."""
    named = len(config.ucx_net_devices.split("/"))
    if named not in (1, ranks):
        raise ConfigError(
            f"--ucx-net-devices {config.ucx_net_devices} has devices for {named} ranks, and this node has {ranks}: "
            "name them once for all, or for each rank"
        )


def devices_of(config: TransferConfig, rank: int = 0) -> str:
    """Returns the network devices of one rank, in the form of ``UCX_NET_DEVICES``; empty if it may use all."""
    by_rank = config.ucx_net_devices.split("/")
    return by_rank[rank if len(by_rank) > 1 else 0]


def configured_ucx(
    config: TransferConfig, make_poster: MakePoster = UcxxPoster, *, loopback: bool = False, rank: int = 0
) -> UcxTransport:
    """Makes the transport that the settings describe, for one rank. Raises TransferError.

    UCX trusts whoever reaches its ports, and it listens on every network device by default. With ``loopback`` it uses
    the loopback device alone, unless the settings or the environment name devices.
    """
    devices = devices_of(config, rank)
    if loopback:
        devices = devices or os.environ.get("UCX_NET_DEVICES", "") or LOOPBACK_DEVICE
    return UcxTransport(config.ucx_tls, devices, config.ucx_tcp_ports, rails=config.ucx_rails, make_poster=make_poster)
