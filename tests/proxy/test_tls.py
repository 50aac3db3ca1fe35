"""HTTPS by flags, with a certificate that is made here."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from pdserve.cli.up.cluster import registered_nodes
from pdserve.cli.up.command import proxy_tls
from pdserve.config import ProxyConfig, TlsConfig
from pdserve.doctor.cluster import check_instances, read_instances
from pdserve.errors import ConfigError
from pdserve.http import server
from pdserve.http.tls import Certificate, ServerTls, Trust, read_authorities, read_certificate, trusting_only
from pdserve.settings import load
from pdserve.wire.discovery import Role
from pdserve_proxy.upstream.node_connection import NodeUnreachable
from pdserve_proxy.upstream.node_pool import NodePool
from tests.proxy.cluster import cluster, node_info, proxy_config
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


async def test_streams_and_refusals_over_tls(authority: trustme.CA, tls: TlsConfig) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.finish()

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
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")  # This request is not encrypted.
        assert b"200" not in await reader.read()
        writer.close()


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["silent", "a-part-of-a-hello"])
async def test_a_handshake_that_is_not_finished_is_cut(
    authority: trustme.CA, tls: TlsConfig, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.3)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def cut(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(begun)
        try:
            with suppress(ConnectionError):
                await reader.read()
        finally:
            writer.close()

    async with cluster(proxy_config(tls=tls)) as running:
        url = running.addresses.url
        host, _, port = url.removeprefix("https://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
        async with asyncio.timeout(20):  # The event loop's own timeout is 60 s.
            await asyncio.gather(*(cut(host, int(port)) for _ in range(20)))
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")  # The handshake of this connection was over.
        writer.close()


async def test_the_proxys_own_certificate_is_enough_for_its_neighbours(
    authority: trustme.CA, tls: TlsConfig, tmp_path: Path
) -> None:
    issued = authority.issue_cert("somewhere.else.example")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(tmp_path / "cert.pem", append=True)
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    shown = TlsConfig(cert=str(tmp_path / "cert.pem"), key=str(tmp_path / "key.pem"))

    async with cluster(proxy_config(tls=shown)) as running:
        url = running.addresses.url
        environ = {"PDSERVE_TLS_CERT": shown.cert, "PDSERVE_TLS_KEY": shown.key}
        own = proxy_tls(environ)
        assert own is not None
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=own)) as session:
            assert await registered_nodes(session, url) == set()
            async with session.get(f"{url}/live") as response:
                assert response.status == 200
        for other in (trusting_only(tls.cert), Trust(read_authorities(str(ca))).context):
            async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(ssl=other)) as distrusting:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await distrusting.get("/live")
    assert proxy_tls({}) is None


async def test_the_doctor_asks_a_proxy_whose_authority_it_is_given(
    authority: trustme.CA, tls: TlsConfig, tmp_path: Path
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    async with cluster(proxy_config(tls=tls)) as running:
        url = running.addresses.url
        trust = Trust(read_authorities(str(tmp_path / "ca.pem")))
        assert await asyncio.to_thread(read_instances, url, 5.0, trust) == []
        refused = await asyncio.to_thread(read_instances, url, 5.0)
        assert isinstance(refused, str)
        [finding] = check_instances(url, refused)
        assert "--tls-ca" in finding.advice


async def test_nodes_behind_https_are_checked_by_one_context_that_can_be_replaced(
    authority: trustme.CA, tls: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ssl.SSLContext] = []
    create = ssl.create_default_context

    def counted(*args: Any, **named: Any) -> ssl.SSLContext:
        made.append(create(*args, **named))
        return made[-1]

    async def node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    shown = ServerTls(read_certificate(tls.cert, tls.key))
    server = await asyncio.start_server(node, "127.0.0.1", 0, ssl=shown.context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    trust = Trust(authority.cert_pem.bytes())
    pool = NodePool(connect_timeout_s=5.0, max_connections=8, trust=trust)
    monkeypatch.setattr(ssl, "create_default_context", counted)

    async def ask() -> bytes:
        return await (await pool.post(url, "/x", {}, b"", silence_s=5.0)).read()

    async with server:
        assert await asyncio.gather(*(ask() for _ in range(6))) == [b"{}"] * 6
        assert len(made) == 1
        trust.renew(authority.cert_pem.bytes())
        assert await ask() == b"{}"
        assert len(made) == 1
        trust.renew(trustme.CA().cert_pem.bytes())
        with pytest.raises(NodeUnreachable, match="certificate"):
            await ask()
        shown.renew(read_certificate(tls.cert, tls.key))
        trust.renew(authority.cert_pem.bytes())
        assert await ask() == b"{}"
        with pytest.raises(ConfigError):
            shown.renew(Certificate(b"nonsense", b""))
        assert await ask() == b"{}"
        pool.close()


NO_CERTIFICATE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("content", ["", "no certificate", NO_CERTIFICATE])
def test_authorities_that_cannot_be_used_are_configuration_errors(tmp_path: Path, content: str) -> None:
    file = tmp_path / "ca.pem"
    file.write_text(content)
    for read in (read_authorities, trusting_only):
        with pytest.raises(ConfigError, match="TLS"):
            read(str(file))
        with pytest.raises(ConfigError, match="TLS"):
            read(str(tmp_path / "none"))


def test_files_that_cannot_be_used_are_configuration_errors(tls: TlsConfig, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for cert, key in ((str(tmp_path / "none"), tls.key), (tls.cert, ""), (str(broken), tls.key), (tls.cert, tls.cert)):
        with pytest.raises(ConfigError, match="TLS"):
            read_certificate(cert, key)


def test_half_of_the_settings_is_a_configuration_error(tls: TlsConfig) -> None:
    with pytest.raises(ConfigError, match="--tls-key"):
        load(ProxyConfig, ["--tls-cert", tls.cert], {}, prog="pdserve proxy")
