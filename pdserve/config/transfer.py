"""How KV blocks move between engines."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdserve.config.declare import Switch, setting

OVERLAP_FROM_TOKENS = 2048
"""Without a setting, the blocks of prompts that are no shorter move while the rest is computed."""


class KvStaging(enum.Enum):
    """Whether KV blocks pass through staging blocks in host memory on their way between two caches."""

    AUTO = "auto"
    """Blocks are staged when the cache is not in host memory."""
    ON = "on"
    """Blocks are always staged: to test or to measure staging without a GPU."""
    OFF = "off"
    """Blocks are never staged: UCX reads and writes the cache itself, also a GPU's (CUDA IPC, GPUDirect RDMA)."""


class UcxCalls(enum.Enum):
    """The code that posts and completes the messages of KV blocks."""

    AUTO = "auto"
    """The code is compiled if there is a compiler, and Python otherwise."""
    COMPILED = "compiled"
    PYTHON = "python"


class Disaggregation(enum.Enum):
    """Whether a decode node has prompts computed by prefill nodes."""

    AUTO = "auto"
    """Prefill nodes compute a prompt where that is estimated to be the faster way."""
    ALWAYS = "always"
    """Prefill nodes compute every prompt that lacks more than one block on the decode node."""
    NEVER = "never"


class KvReturn(enum.Enum):
    """Whether decode nodes return the KV blocks of answers to prefill nodes."""

    AUTO = "auto"
    """They do, unless the prefix cache is off."""
    ON = "on"
    OFF = "off"


class KvOverlap(enum.Enum):
    """The time at which a prefill node pushes the KV blocks of a prompt that it computes in chunks."""

    AUTO = "auto"
    """Blocks are pushed early if the prompt is long enough for it to pay."""
    ON = "on"
    """The blocks of each chunk are pushed while the next chunk computes."""
    OFF = "off"
    """All blocks are pushed when the prompt is computed."""


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """KV transfer between engines, each of which may fetch from any other."""

    host: str = setting(
        "transfer-host",
        "The engine's control channel, where other nodes ask for KV blocks, listens at this address.",
        "127.0.0.1",
        first=True,
    )
    port: int = setting(
        "transfer-port", "The control channel has this port. 0 takes a free one.", 0, minimum=0, maximum=65535
    )
    advertise: str = setting(
        "transfer-advertise",
        "Other engines reach the control channel at this name or address. Empty: the bound one, or this machine's "
        "name if it is bound to all addresses.",
        "",
    )
    heartbeat_ms: int = setting(
        "transfer-heartbeat-ms",
        "Engines pause for this many milliseconds between pings while transfers are alive.",
        500,
        minimum=10,
        maximum=60_000,
    )
    lease_ms: int = setting(
        "transfer-lease-ms",
        "Another engine that is silent for this many milliseconds counts as dead, and a transfer whose sent blocks do "
        "not land for as long has stalled. Raise it if links take longer to open.",
        3000,
        minimum=20,
        maximum=600_000,
    )
    prefill_timeout_ms: int = setting(
        "prefill-timeout-ms",
        "A prefill node gets this many milliseconds for a prompt, beyond what its queue and the prompt's length "
        "need. Then the decode node asks the next one, or computes the prompt.",
        30_000,
        minimum=1,
        maximum=3_600_000,
    )
    disaggregation: Disaggregation = setting(
        "disaggregation",
        "Which prompts a decode node gives to prefill nodes. 'auto' gives those that are estimated to be faster there.",
        Disaggregation.AUTO,
        first=True,
    )
    checksums: Switch = setting("kv-checksums", "The engine checks every KV block that it receives.", Switch.ON)
    overlap: KvOverlap = setting(
        "kv-overlap",
        "KV blocks are sent while the rest of the prompt is computed. 'auto' does so for long prompts.",
        KvOverlap.AUTO,
    )
    kv_return: KvReturn = setting(
        "kv-return",
        "Prefill nodes fetch the KV blocks of answers from decode nodes into their prefix caches, for a conversation's "
        "next turn. 'auto' does so if --prefix-cache is on.",
        KvReturn.AUTO,
    )
    staging: KvStaging = setting(
        "kv-staging",
        "KV blocks are copied through host memory. 'auto' does so for a GPU's cache. On a GPU, 'off' needs "
        "--kv-checksums off.",
        KvStaging.AUTO,
    )
    staging_mib: int = setting(
        "kv-staging-mib",
        "Page-locked host memory for staging, in MiB. Size it for the blocks of all prompts under way.",
        4096,
        minimum=1,
    )
    shared_cache: Switch = setting(
        "kv-shared-cache",
        "Other engines of the same user and host may map this node's KV cache, if it is on a CPU, and read it.",
        Switch.ON,
    )
    ucx_calls: UcxCalls = setting(
        "ucx-calls",
        "The messages of KV blocks are posted by C++, which g++ compiles once, or by Python. 'auto' takes C++ if it "
        "can.",
        UcxCalls.AUTO,
    )
    ucx_register: Switch = setting(
        "ucx-register",
        "KV memory is registered with the network devices as a whole when a link opens. 'off' registers each block "
        "when it first moves.",
        Switch.OFF,
    )
    ucx_tls: str = setting(
        "ucx-tls", "UCX uses these transports, written as in UCX_TLS. Empty: UCX chooses.", "", first=True
    )
    ucx_net_devices: str = setting(
        "ucx-net-devices",
        "UCX uses these network devices, written as in UCX_NET_DEVICES. Ranks are separated by '/': "
        "mlx5_0:1/mlx5_1:1. Empty: all devices.",
        "",
    )
    ucx_rails: int = setting(
        "ucx-rails",
        "UCX spreads each KV block over at most this many network devices. 0: two for RDMA, one for TCP.",
        0,
        minimum=0,
        maximum=16,
    )
    ucx_tcp_ports: str = setting(
        "ucx-tcp-ports", "KV blocks over TCP use these ports, for example 42000-42999. Empty: any.", ""
    )
