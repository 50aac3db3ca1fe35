"""The settings of the proxy."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pdserve.config.declare import Switch, setting
from pdserve.config.engine import TargetsConfig
from pdserve.config.http import HttpConfig, SecurityConfig, TlsConfig, TrustConfig
from pdserve.config.observability import LogConfig, TraceConfig
from pdserve.config.requests import RequestConfig


class RoleChoice(enum.Enum):
    """Who decides which nodes prefill and which decode."""

    FIXED = "fixed"
    """Nodes have the roles that they were started with, or that ``pdserve role`` gave them."""
    AUTO = "auto"
    """The proxy moves nodes between roles by what they measure."""


class PrefillAnswers(enum.Enum):
    """Whether a prefill node that has nothing to prefill answers requests itself."""

    AUTO = "auto"
    """Where it shares no machine with the decode node."""
    ON = "on"
    OFF = "off"


FEW_PROMPTS = 0.3
"""A prefill node that has prompts for a larger share of the time answers nothing. ``pdserve.plan`` goes by it, too."""
NEWEST_SHARE = 0.1
"""The weight of the newest heartbeat in that share: about the last ten count."""


class RoutingPolicy(enum.Enum):
    """The way in which the proxy chooses nodes for a request."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    TWO_CHOICES = "two-choices"
    PREFIX_AFFINITY = "prefix-affinity"


class SharedPrefixes(enum.Enum):
    """Which requests may find each other's prompts in prefix caches."""

    KEY = "key"
    """Those with API keys of one owner."""
    ALL = "all"


class StatusPage(enum.Enum):
    """Who may see the proxy's status page."""

    AUTO = "auto"
    """Those on this machine, if the proxy listens on loopback alone; elsewhere those with a key, if there are keys."""
    ON = "on"
    """Whoever may send requests."""
    OFF = "off"


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """The proxy's side of discovery."""

    control_host: str = setting(
        "control-host", "The proxy takes registrations on this address.", "127.0.0.1", first=True
    )
    control_port: int = setting(
        "control-port",
        "The proxy takes registrations on this port. 0 takes a free one.",
        8100,
        minimum=0,
        maximum=65535,
        first=True,
    )
    heartbeat_ms: int = setting(
        "heartbeat-ms",
        "Nodes send heartbeats this many milliseconds apart. The proxy tells them so.",
        1000,
        minimum=10,
        maximum=60_000,
    )
    missed_heartbeats: int = setting(
        "missed-heartbeats", "A node that misses this many heartbeats in a row is dropped.", 3, minimum=1
    )


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """The proxy's processes."""

    count: int = setting(
        "workers", "This many processes serve clients on the one port.", 1, minimum=1, maximum=64, first=True
    )


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """The way to choose nodes for a request."""

    policy: RoutingPolicy = setting(
        "policy", "The proxy chooses the nodes for a request in this way.", RoutingPolicy.ROUND_ROBIN, first=True
    )
    prefill_answers: PrefillAnswers = setting(
        "prefill-answers",
        "A prefill node without prompts, and less busy than the decode node, answers requests itself. 'auto' does so "
        "unless the two divide the cores of one machine.",
        PrefillAnswers.AUTO,
    )


@dataclass(frozen=True, slots=True)
class RolesConfig:
    """The nodes' roles, and how the proxy moves nodes between them."""

    roles: RoleChoice = setting(
        "roles",
        "'auto' moves nodes between prefill and decode by load. Set it at one proxy of a cluster only.",
        RoleChoice.FIXED,
    )
    interval_ms: int = setting(
        "roles-interval-ms",
        "--roles auto looks at the nodes at this interval, in milliseconds.",
        1000,
        minimum=10,
        maximum=600_000,
    )
    looks: int = setting(
        "roles-looks", "A node changes its role when this many looks in a row call for it.", 5, minimum=1, maximum=1000
    )
    rest_s: float = setting(
        "roles-rest-s",
        "After such a change, nodes keep their roles for this many seconds.",
        30.0,
        minimum=0,
        maximum=86_400,
    )


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The clients that the proxy serves, and how many requests it takes at once."""

    api_keys: tuple[str, ...] = setting(
        "api-key", "Clients have to send this key. Better give a file. May be repeated.", (), secret=True, first=True
    )
    api_key_file: str = setting(
        "api-key-file",
        "Clients have to send a key of this file. Each line is a key, or a name and a key.",
        "",
        first=True,
    )
    share_prefixes: SharedPrefixes = setting(
        "share-prefixes",
        "With API keys, requests find cached prompts of their own key's owner only. 'all': of all keys, which is "
        "faster where keys share long prompts and tells each key's clients what others have sent.",
        SharedPrefixes.KEY,
    )
    max_in_flight: int = setting(
        "max-in-flight",
        "At most this many answers are under way at once; more requests wait. A request counts as often as it asks "
        "for answers. 0: no bound.",
        4096,
        minimum=0,
    )
    max_in_flight_per_key: int = setting(
        "max-in-flight-per-key",
        "At most this many answers of one API key are under way or waiting, at all proxies together. 0: no bound.",
        0,
        minimum=0,
    )
    max_queued: int = setting("max-queued", "At most this many requests wait at once. More get 503.", 1024, minimum=0)
    max_uploads: int = setting(
        "max-uploads",
        "At most this many request bodies are on their way at once, a quarter of them from one client.",
        1024,
        minimum=1,
    )
    body_memory_mib: int = setting(
        "body-memory-mib",
        "Request bodies above 64 KiB take at most this much memory, in MiB, until a node answers; half of it for one "
        "client.",
        1024,
        minimum=1,
    )
    queue_timeout_s: float = setting(
        "queue-timeout-s",
        "A request waits for its turn for at most this many seconds.",
        30.0,
        minimum=0.01,
        maximum=3600,
    )
    priorities: Switch = setting("priorities", "Requests may name a priority. 'off' refuses all but 0.", Switch.ON)


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The proxy's connections to nodes, and what becomes of a stream whose node is lost."""

    connect_timeout_s: float = setting(
        "connect-timeout-s", "Connecting to a node may take this many seconds.", 5.0, minimum=0.1, maximum=600
    )
    idle_timeout_s: float = setting(
        "idle-timeout-s",
        "A node that sends no byte of an answer for this many seconds counts as stuck.",
        120.0,
        minimum=0.1,
        maximum=86_400,
    )
    max_connections: int = setting(
        "max-connections", "The proxy keeps at most this many connections to nodes.", 8192, minimum=1
    )
    resume: Switch = setting("resume", "When a stream's node is lost, another node goes on with the answer.", Switch.ON)
    resume_wait_s: float = setting(
        "resume-wait-s",
        "A request whose node is lost waits for another node for this many seconds. So does a client that asks for "
        "the rest of an answer.",
        10.0,
        minimum=0.0,
        maximum=86_400,
    )
    suspect_s: float = setting(
        "suspect-s",
        "A request with which two nodes were lost is refused for this many seconds. 0 lets it try again.",
        60.0,
        minimum=0.0,
        maximum=86_400,
    )
    max_resumes: int = setting(
        "max-resumes",
        "At most this many streams are resumed at once; others wait. 0: two for each node that computes prompts.",
        0,
        minimum=0,
    )
    max_moves: int = setting(
        "max-moves",
        "At most this many answers move at once from nodes that drain or run out of KV blocks.",
        4,
        minimum=1,
    )
    journal_mib: int = setting(
        "journal-mib",
        "Journals, from which streams are resumed, take at most this much memory in each proxy process, in MiB, and "
        "one stream's at most a 32nd of it.",
        64,
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The responses that the proxy keeps for clients that ask for them again, or go on from them."""

    store: Switch = setting(
        "store",
        "The proxy keeps the responses of /v1/responses in memory, so that clients can fetch and continue them.",
        Switch.OFF,
        bare="on",
    )
    store_mib: int = setting(
        "store-mib",
        "Stored responses take at most this much memory, in MiB, and one of them at most an eighth of it. The oldest "
        "are removed.",
        256,
        minimum=1,
        maximum=1_048_576,
    )
    responses: int = setting(
        "store-responses", "At most this many responses are kept.", 100_000, minimum=1, maximum=10_000_000
    )
    ttl_s: float = setting(
        "store-ttl-s", "A response is kept for this many seconds.", 3_600.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class StatusConfig:
    """The proxy's page about the cluster, and who may give nodes commands there."""

    page: StatusPage = setting(
        "status-page",
        "Who sees the cluster at / and /status: 'on' all who may send requests, 'off' nobody, 'auto' everybody on "
        "loopback and elsewhere those with a key. If there are admin keys, they need one.",
        StatusPage.AUTO,
        first=True,
    )
    admin_key_file: str = setting(
        "admin-key-file",
        "Owners of the keys in this file see the status page and may drain nodes and change roles there. Each line "
        "is a key, or a name and a key. These are no keys for requests.",
        "",
    )


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The settings of ``pdserve proxy``."""

    http: HttpConfig = field(default_factory=lambda: HttpConfig(port=8000))
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    status: StatusConfig = field(default_factory=StatusConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    relay: RelayConfig = field(default_factory=RelayConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    log: LogConfig = field(default_factory=LogConfig)
