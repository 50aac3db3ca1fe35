"""``pdserve proxy`` serves the proxy. It does not import torch, so that it starts in a fraction of a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from pdserve.cli.port_checks import check_http, check_port
from pdserve.config import ProxyConfig
from pdserve.settings import load, resolve_secret, state_folder


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
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

    from pdserve_proxy.server import serve

    return serve(config, secret, read_secret)
