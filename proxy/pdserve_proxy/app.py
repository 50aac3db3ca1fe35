"""Builds the proxy's HTTP application: relayed routes, and behind them Quart with the routes about the cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec
from quart import Quart, Response, request

from pdserve.config import HttpConfig, ProxyConfig, Switch
from pdserve.errors import NotFound, Unavailable
from pdserve.http.documentation import add_documentation
from pdserve.http.model_list import ModelCard, ModelList
from pdserve.http.request import request_label
from pdserve.http.routes import DirectRoutes, quart_app
from pdserve.settings import is_loopback
from pdserve.wire.discovery import used_share
from pdserve.wire.ids import MAX_REQUEST_ID_CHARS
from pdserve.wire.version import INSTALLED_VERSION, SPOKEN
from pdserve_proxy.credentials import LiveCredentials
from pdserve_proxy.metrics import CONTENT_TYPE, ProxyMetrics
from pdserve_proxy.records.access_log import OTHER_ROUTES
from pdserve_proxy.registry.snapshot import RegisteredNode, RegistryView
from pdserve_proxy.relay.relay import Relay
from pdserve_proxy.relayed_routes import READ_ROUTES, RELAYED_ROUTES, RelayedRoutes
from pdserve_proxy.requests.admission_queue import AdmissionController
from pdserve_proxy.requests.held_bodies import HeldBodies
from pdserve_proxy.responses.routes import StoredResponseRoutes
from pdserve_proxy.responses.store import ResponseStorage
from pdserve_proxy.responses.turn import RESPONSES_PATH
from pdserve_proxy.routing.router import RETRY_AFTER_S, model_not_found
from pdserve_proxy.status.access import check_loopback_name, check_watcher
from pdserve_proxy.status.routes import StatusRoutes
from pdserve_proxy.timelines import Timelines

RenderMetrics: TypeAlias = Callable[[], Awaitable[bytes]]
"""Returns the metrics of all processes of the proxy as Prometheus text. May raise RequestError."""

_encoder = msgspec.json.Encoder()


class InstanceLoad(msgspec.Struct, frozen=True):
    """The load of a node in ``/instances``, where nothing is left out."""

    running: int
    waiting: int
    free_blocks: int
    """Those of whole contexts."""
    cache_used: float | None
    """The share of its KV blocks in use, in the cache group that has least left; None until the node has said it."""
    queue_s: float
    step_s: float


class Instance(msgspec.Struct, frozen=True):
    """One entry of ``/instances``."""

    name: str
    role: str
    state: str
    url: str
    control: str
    model: str
    fingerprint: str
    boot_id: str
    protocol: int
    """The newest version of the protocol between hosts that the node supports."""
    load: InstanceLoad
    heartbeat_age_s: float


class ProxyServerInfo(msgspec.Struct, frozen=True):
    """What ``/server_info`` says of a proxy."""

    version: str
    protocol: int
    """The newest version of the protocol between hosts that it speaks."""
    models: list[str]
    nodes: dict[str, int]
    """How many nodes of each role are registered."""
    max_body_bytes: int
    process: str = "proxy"


class InformationRoutes:
    """Answers requests about the cluster from the registry, without asking a node."""

    def __init__(
        self,
        registry: RegistryView,
        scrape: RenderMetrics,
        credentials: LiveCredentials,
        http: HttpConfig,
        timelines: Timelines,
        lives: Callable[[], bool],
    ) -> None:
        self._timelines = timelines
        self._lives = lives
        self._max_body_bytes = http.max_body_bytes
        self._on_loopback = is_loopback(http.host)
        self._registry = registry
        self._scrape = scrape
        self._keys = credentials.keys
        self._admins = credentials.admins
        self._started = int(time.time())

    def add_routes(self, app: Quart) -> None:
        app.add_url_rule("/v1/models", "models", self.models)
        app.add_url_rule("/v1/models/", "models", self.models)
        app.add_url_rule("/v1/models/<path:name>", "model", self.model)
        app.add_url_rule("/health", "health", self.live)
        app.add_url_rule("/ping", "ping", self.live)
        app.add_url_rule("/live", "live", self.live)
        app.add_url_rule("/ready", "ready", self.ready)
        app.add_url_rule("/instances", "instances", self.instances)
        app.add_url_rule("/requests/<path:request_id>/timeline", "timeline", self.timeline)
        app.add_url_rule("/metrics", "metrics", self.metrics)
        app.add_url_rule("/version", "version", self.version)
        app.add_url_rule("/server_info", "server_info", self.server_info)

    async def models(self) -> Response:
        self._check_key()
        return _json(ModelList(list(self._cards().values())))

    async def model(self, name: str) -> Response:
        self._check_key()
        card = self._cards().get(name)
        if card is None:
            raise model_not_found(name, self._cards())
        return _json(card)

    def _check_host(self, what: str) -> None:
        """Raises Forbidden for a page whose name leads to loopback: browsers take this server for the page's own.

        Such a page has no key. Whoever sends one may use any name.
        """
        sent = request.headers
        authorization = sent.get("authorization")
        with_key = self._admins.holds(authorization) or self._keys.holds(authorization, sent.get("x-api-key"))
        if self._on_loopback and not with_key:
            check_loopback_name(sent.get("host", ""), what)

    def _check_key(self) -> None:
        self._keys.caller(request.headers.get("authorization"), request.headers.get("x-api-key"))

    def _cards(self) -> dict[str, ModelCard]:
        lengths: dict[str, int] = {}
        for node in self._registry.snapshot().nodes:
            name, length = node.info.model, node.info.capacity.max_model_len
            lengths[name] = min(length, lengths.get(name, length))
        return {name: ModelCard(name, self._started, name, length) for name, length in lengths.items()}

    async def live(self) -> Response:
        if not self._lives():
            raise Unavailable("the proxy's supervisor does not answer", retry_after_s=RETRY_AFTER_S)
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        snapshot = self._registry.snapshot()
        if not snapshot.pairings:
            raise Unavailable("no model can be served now", code="no_route", retry_after_s=RETRY_AFTER_S)
        if not (ready := snapshot.ready_models):
            raise Unavailable("the nodes connect to each other", code="connecting", retry_after_s=RETRY_AFTER_S)
        return _json({"status": "ready", "models": ready})

    async def instances(self) -> Response:
        self._check_host("what is known of the nodes")
        now = time.monotonic()
        return _json([_instance(node, now) for node in self._registry.snapshot().nodes])

    async def timeline(self, request_id: str) -> Response:
        sent = request.headers
        check_watcher(self._keys, self._admins, sent.get("authorization"), sent.get("x-api-key"))
        self._check_host("a timeline")
        if len(request_id) > MAX_REQUEST_ID_CHARS or request_label(request_id) != request_id:
            raise NotFound("a request id has 1 to 128 visible ASCII characters", code="no_timeline")
        return _json(await self._timelines.find(request_id))

    async def metrics(self) -> Response:
        self._check_host("what is counted")
        return Response(await self._scrape(), content_type=CONTENT_TYPE)

    async def version(self) -> Response:
        return _json({"version": INSTALLED_VERSION})

    async def server_info(self) -> Response:
        roles = Counter(node.info.role.value for node in self._registry.snapshot().nodes)
        models = sorted(self._cards())
        return _json(ProxyServerInfo(INSTALLED_VERSION, SPOKEN.newest, models, dict(roles), self._max_body_bytes))


def _instance(node: RegisteredNode, now: float) -> Instance:
    info, load = node.info, node.load
    return Instance(
        name=info.name,
        role=info.role.value,
        state=node.state.value,
        url=info.url,
        control=info.control,
        model=info.model,
        fingerprint=info.fingerprint,
        boot_id=info.boot_id.hex(),
        protocol=info.protocol,
        load=InstanceLoad(
            running=load.running,
            waiting=load.waiting,
            free_blocks=load.free_blocks,
            cache_used=None if (used := used_share(info.capacity, load)) is None else round(used, 4),
            queue_s=load.queue_s,
            step_s=load.step_s,
        ),
        heartbeat_age_s=round(now - node.seen_s, 3),
    )


def _json(value: object) -> Response:
    return Response(_encoder.encode(value), content_type="application/json")


def build_app(
    config: ProxyConfig,
    credentials: LiveCredentials,
    bodies: HeldBodies,
    admission: AdmissionController,
    registry: RegistryView,
    relay: Relay,
    metrics: ProxyMetrics,
    scrape: RenderMetrics,
    timelines: Timelines,
    storage: ResponseStorage | None = None,
    status: StatusRoutes | None = None,
    lives: Callable[[], bool] = lambda: True,
) -> DirectRoutes:
    """Returns the proxy's ASGI application.

    ``storage`` has the responses that are stored, if any are, and ``status`` the routes of those who watch the cluster.
    ``lives`` returns whether the proxy's other processes live.
    """

    def count_error(status: int) -> None:
        metrics.counts.requests[OTHER_ROUTES, status] += 1

    routes = (*sorted(RELAYED_ROUTES | READ_ROUTES), "/v1/models")
    metrics.counts.expect((*RELAYED_ROUTES, *READ_ROUTES))
    app = quart_app("proxy", config.http.max_body_bytes, count_error, routes)
    InformationRoutes(registry, scrape, credentials, config.http, timelines, lives).add_routes(app)
    add_documentation(app, "proxy")
    if status is not None:
        status.add_routes(app)
    priorities = config.admission.priorities is Switch.ON
    relayed = RelayedRoutes(
        config.http.max_body_bytes,
        credentials.keys,
        bodies,
        admission,
        relay,
        storage,
        priorities=priorities,
        share_prefixes=config.admission.share_prefixes,
    )
    handlers, readers = (dict.fromkeys(paths, relayed.handle) for paths in (RELAYED_ROUTES, READ_ROUTES))
    if storage is not None:
        handlers[RESPONSES_PATH] = relayed.handle_stored
    stored = StoredResponseRoutes(storage, credentials.keys, bodies)
    return DirectRoutes(handlers, app, "proxy", count_error, readers, stored.find)
