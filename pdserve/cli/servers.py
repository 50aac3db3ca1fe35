"""``pdserve proxy`` serves the proxy, and ``pdserve prefill``, ``decode`` and ``mixed`` serve one node.

This module imports neither torch nor what reads models, so that a proxy starts in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from functools import partial

from pdserve.config import HttpConfig, NodeConfig, ProxyConfig, SchedulerConfig, Speculate
from pdserve.errors import ConfigError
from pdserve.process import loading_libraries, set_up_logging
from pdserve.settings import cache_folder, load, resolve_secret, state_folder
from pdserve.wire.discovery import Role

log = logging.getLogger(__name__)

_DESCRIPTIONS = {
    Role.PREFILL: (
        "Computes the KV cache of prompts and pushes it to the decode nodes that ask. While it has no prompts, the "
        "proxy may have it answer requests: give it the settings of the decode nodes."
    ),
    Role.DECODE: (
        "Answers requests, with the prompt's KV cache from a prefill node. "
        "Without --proxy it serves clients directly and prefills by itself."
    ),
    Role.MIXED: "Answers requests; prefills and decodes in one engine. Without --proxy it serves clients directly.",
}


def run_node(role: Role, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises ConfigError and ModelError."""
    config = load(NodeConfig, argv, environ, prog=f"pdserve {role.value}", description=_DESCRIPTIONS[role])
    _check(role, config)
    check_http(config.http)
    check_port(config.transfer.host, config.transfer.port, "--transfer-port", "--transfer-host")
    read_secret = partial(resolve_secret, config.security, _binds(config), state_folder(environ))
    secret = read_secret()

    # Neither a mistake above nor a proxy needs these, which read models.
    with loading_libraries():
        from pdserve.cli.start_checks import check_node
        from pdserve.hub.finding import FoundModel, known_model, with_found_draft_model

    set_up_logging(config.log, "api", node=config.discovery.name)
    cache_dir = cache_folder(environ)
    found = known_model(config.model, environ)
    if not isinstance(found, FoundModel):
        from pdserve.hub.fetching_node import fetch_model

        fetched = asyncio.run(fetch_model(found, config, environ))
        if fetched is None:
            return 0
        found = fetched
    if found.commit:
        log.info("model %s, revision %s", found.name, found.commit)
    scheduler = with_found_draft_model(config.scheduler, config.model, environ)
    config = dataclasses.replace(config, scheduler=scheduler)
    check_node(config, found.path)
    name = config.model.served_model_name or found.name
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, served_model_name=name))

    with loading_libraries():
        from pdserve.api.node.server import serve

    return serve(role, config, secret, found.path, cache_dir, read_secret=read_secret)


run_prefill = partial(run_node, Role.PREFILL)
run_decode = partial(run_node, Role.DECODE)
run_mixed = partial(run_node, Role.MIXED)


def _check(role: Role, config: NodeConfig) -> None:
    if role is Role.PREFILL and not config.discovery.proxies:
        raise ConfigError("--proxy is needed: a prefill node works for the decode nodes of a proxy, as tcp://host:port")
    check_draft_model(config.scheduler)
    allowed = os.sched_getaffinity(0)
    missing = sorted(set(config.cpu.cores) - allowed)
    if missing:
        raise ConfigError(f"--cores: {missing} are not among the cores of this process, {sorted(allowed)}")


def check_draft_model(scheduler: SchedulerConfig) -> None:
    """Raises ConfigError if a draft model is named that the other settings do not use."""
    mode = scheduler.speculation
    if scheduler.draft_model and mode not in (Speculate.AUTO, Speculate.OFF):
        raise ConfigError(f"--draft-model drafts with --speculation auto alone, which is {mode.value}")


def _binds(config: NodeConfig) -> list[str]:
    """Returns the addresses that the node listens at. Nobody fetches from a node that belongs to no proxy."""
    return [config.http.host, config.transfer.host] if config.discovery.proxies else [config.http.host]


def run_proxy(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises ConfigError."""
    config = load(
        ProxyConfig,
        argv,
        environ,
        prog="pdserve proxy",
        description="Takes clients' requests and registrations of nodes, and spreads the ones over the others.",
    )
    check_http(config.http)
    check_port(config.registry.control_host, config.registry.control_port, "--control-port", "--control-host")
    binds = [config.http.host, config.registry.control_host]
    read_secret = partial(resolve_secret, config.security, binds, state_folder(environ))
    secret = read_secret()

    with loading_libraries():
        from pdserve_proxy.server import serve

    return serve(config, secret, read_secret)


def check_port(host: str, port: int, flag: str, host_flag: str) -> None:
    """Raises ConfigError if this process cannot listen there; ``flag`` and ``host_flag`` say what to change."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        raise ConfigError(_port_words(host, port, flag, host_flag, exc)) from exc


def _port_words(host: str, port: int, flag: str, host_flag: str, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{flag} {port} is taken: another program listens on {host}:{port}. Stop that, or give another {flag}; "
                "0 takes a free one"
            )
        case errno.EACCES:
            return f"{flag} {port}: this user may not listen on ports below 1024; give {flag} a higher one"
        case _:
            return f"{host_flag} {host}: this machine cannot listen on that address ({error.strerror or error})"


def check_http(http: HttpConfig) -> None:
    """Raises ConfigError if this process cannot listen where clients are to connect."""
    check_port(http.host, http.port, "--port", "--host")
