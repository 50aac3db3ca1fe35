"""HTTPS by flags, with a certificate that is made here."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest
import trustme

from pdserve.config import ProxyConfig, TlsConfig
from pdserve.errors import ConfigError
from pdserve.http_guard import server_tls
from pdserve.settings import load
from pdserve.wire.discovery import Role
from tests.proxy.cluster import cluster, node_info, proxy_config, run_async
from tests.proxy.fake_node import Exchange, FakeNode


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(folder / "cert.pem", append=True)
    return TlsConfig(cert=str(folder / "cert.pem"), key=str(folder / "key.pem"))


def test_streams_and_refusals_over_tls(authority: trustme.CA, tls: TlsConfig) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.finish()

    async def scenario() -> None:
        async with FakeNode(stream) as node, cluster(proxy_config(tls=tls)) as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            url = running.addresses.url
            assert url.startswith("https://")
            async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(ssl=trusting)) as http:
                async with http.post("/v1/completions", json={"stream": True}) as response:
                    assert await response.read() == b"data: 1\n\n"
                async with http.get("/live", headers={"x": "y" * 2**17}) as response:
                    assert response.status == 431
            async with aiohttp.ClientSession(url) as distrusting:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await distrusting.get("/live")
            host, _, port = url.removeprefix("https://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")  # not in the clear
            assert b"200" not in await reader.read()
            writer.close()

    run_async(scenario())


def test_files_that_cannot_be_used_are_configuration_errors(tls: TlsConfig, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for cert, key in ((str(tmp_path / "none"), tls.key), (tls.cert, ""), (str(broken), tls.key), (tls.cert, tls.cert)):
        with pytest.raises(ConfigError, match="TLS"):
            server_tls(cert, key)


def test_half_of_the_settings_is_a_configuration_error(tls: TlsConfig) -> None:
    with pytest.raises(ConfigError, match="--tls-key"):
        load(ProxyConfig, ["--tls-cert", tls.cert], {}, prog="pdserve proxy")
