"""Metrics, logs and traces."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdserve.config.declare import setting


class MetricsNames(enum.Enum):
    """The names of a node's metrics that vLLM has, too."""

    PDSERVE = "pdserve"
    VLLM = "vllm"
    BOTH = "both"


class LogLevel(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.Enum):
    TEXT = "text"
    JSON = "json"
    """Each line is an object."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log, which goes to stderr."""

    level: LogLevel = setting("log-level", "Messages below this level are not logged.", LogLevel.INFO, first=True)
    format: LogFormat = setting(
        "log-format", "Log lines are text for people, or JSON objects for programs.", LogFormat.TEXT
    )


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """What a node's ``/metrics`` shows."""

    names: MetricsNames = setting(
        "metrics-names",
        "Metrics that vLLM has too have pdserve's names (pdserve_...), vLLM's (vllm:...), or both.",
        MetricsNames.BOTH,
    )


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What processes remember of requests, and the OpenTelemetry spans that they make of it."""

    kept_timelines: int = setting(
        "kept-timelines",
        "A process remembers this many of its last requests for pdserve trace. 0 remembers none.",
        512,
        minimum=0,
        maximum=100_000,
    )
    otlp_endpoint: str = setting(
        "otlp-endpoint",
        "Spans of requests go to this OpenTelemetry collector, http://host:4318. Needs pdserve[otel]. Empty: no spans.",
        "",
        metavar="URL",
    )
    ratio: float = setting(
        "trace-ratio",
        "This share of the requests without a traceparent header is traced. With one, the client decides.",
        1.0,
        minimum=0,
        maximum=1,
    )

    @property
    def records(self) -> bool:
        """Whether anybody has a use for what is noted of requests."""
        return bool(self.kept_timelines or self.otlp_endpoint)
