"""When each alert has to fire, and when not: series for promtool, with a value a minute."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AT_PROXY = 'namespace="pdserve", pod="pdserve-proxy-0", component="proxy"'
AT_OTHER_PROXY = 'namespace="pdserve", pod="pdserve-proxy-1", component="proxy"'
AT_DECODE = 'namespace="pdserve", pod="pdserve-decode-0", component="decode"'
PROXY = {"namespace": "pdserve", "pod": "pdserve-proxy-0"}
DECODE = {"namespace": "pdserve", "pod": "pdserve-decode-0"}
NAMESPACE = {"namespace": "pdserve"}
ELSEWHERES_PROXY = 'up{namespace="other", pod="pdserve-proxy-0", component="proxy"}'


@dataclass(frozen=True)
class AlertCase:
    """At the minute ``at`` of these series, the alert fires with these labels, or does not fire."""

    alert: str
    at: int
    series: Mapping[str, str]
    fires: Mapping[str, str] | None = None
    value: str = field(default="", kw_only=True)
    """How the alert's value reads in its annotations."""

    def for_promtool(self, rule: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the case as promtool takes it. ``rule`` is the alert's."""
        alerts = []
        if self.fires is not None:
            texts = {name: self._expand(text) for name, text in rule["annotations"].items()}
            alerts.append({"exp_labels": {**rule["labels"], **self.fires}, "exp_annotations": texts})
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in self.series.items()],
            "alert_rule_test": [{"eval_time": f"{self.at}m", "alertname": self.alert, "exp_alerts": alerts}],
        }

    def _expand(self, template: str) -> str:
        assert self.fires is not None
        filled = re.sub(r"{{ \$value[^}]*}}", self.value, template)
        for label, text in self.fires.items():
            filled = filled.replace(f"{{{{ $labels.{label} }}}}", text)
        return filled


@dataclass(frozen=True)
class TriggerCase:
    """At the minute 10 of these series, the trigger ``number`` of a ScaledObject has this value."""

    scaled: str
    number: int
    series: Mapping[str, str]
    value: float

    def for_promtool(self, scaled: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the case as promtool takes it. ``scaled`` is the ScaledObject's specification."""
        query = scaled["triggers"][self.number]["metadata"]["query"]
        expected = [{"labels": "{}", "value": self.value}]
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in self.series.items()],
            "promql_expr_test": [{"expr": query, "eval_time": "10m", "exp_samples": expected}],
        }


def event(alert: str, name: str, fires: Mapping[str, str]) -> list[AlertCase]:
    """The first event fires, for ten minutes. What was counted before does not."""
    return [
        AlertCase(alert, 6, {name: "0x5 1x30"}, fires),
        AlertCase(alert, 20, {name: "0x5 1x30"}),
        AlertCase(alert, 20, {name: "3x30"}),
    ]


def buckets(name: str, labels: str, below_5_s: str, below_10_s: str) -> dict[str, str]:
    bounds = {"5.0": below_5_s, "10.0": below_10_s, "+Inf": below_10_s}
    return {f'{name}_bucket{{{labels}, le="{bound}"}}': values for bound, values in bounds.items()}


def proxies(*, one: str, live: str) -> dict[str, str]:
    """Two proxies, of which Prometheus always reads the other one. That one says how many live."""
    other = f"pdserve_proxy_live_proxies{{{AT_OTHER_PROXY}}}"
    return {f"up{{{AT_PROXY}}}": one, f"up{{{AT_OTHER_PROXY}}}": "1x40", other: live}


def links(transports: str, *, tcp: str, ucx: str = "1.21.0 package") -> dict[str, str]:
    return {
        f'pdserve_kv_links{{{AT_DECODE}, transport="tcp"}}': tcp,
        f'pdserve_kv_links{{{AT_DECODE}, transport="rdma"}}': "2x20",
        f'pdserve_build_info{{{AT_DECODE}, transports="{transports}", ucx="{ucx}"}}': "1x20",
    }


def broken(outcome: str) -> dict[str, str]:
    """A tenth of the streams end so, behind their status 200."""
    return {
        f'pdserve_proxy_requests_total{{{AT_PROXY}, status="200"}}': "0+60x30",
        f'pdserve_proxy_outcomes_total{{{AT_PROXY}, outcome="{outcome}"}}': "0+6x30",
    }


def nodes(proxy: str, role: str) -> str:
    return f'pdserve_proxy_nodes{{{proxy}, role="{role}"}}'


def prompts(*, in_vain: str, failed: str, remote: str) -> dict[str, str]:
    """Prompts for which a decode node has a prefill node, by what became of them."""
    return {
        f'pdserve_prefills_failed_total{{{AT_DECODE}, reason="misfit"}}': in_vain,
        f'pdserve_placement_total{{{AT_DECODE}, source="local", reason="failed"}}': failed,
        f'pdserve_prefills_total{{{AT_DECODE}, source="remote"}}': remote,
    }


UNPAIRED = f'pdserve_proxy_unpaired_nodes{{{AT_PROXY}, role="decode"}}'
BLOCKS = f"pdserve_quarantined_blocks{{{AT_DECODE}}}"
KV_USE = f"pdserve_kv_cache_usage_perc{{{AT_DECODE}}}"
FIRST_TOKENS = "pdserve_time_to_first_token_seconds"

CASES = [
    AlertCase("PdserveNoProxy", 8, {f"up{{{AT_PROXY}}}": "1x4 0x20"}, NAMESPACE),
    AlertCase("PdserveNoProxy", 8, {f"up{{{AT_DECODE}}}": "1x20", ELSEWHERES_PROXY: "1x20"}, NAMESPACE),
    AlertCase("PdserveNoProxy", 8, {'up{job="other"}': "1x20"}, {"component": "proxy"}),
    AlertCase(
        "PdserveNoProxy", 8, {f"up{{{AT_DECODE}}}": "0x20", f"up{{{AT_PROXY}}}": "1x20", ELSEWHERES_PROXY: "1x20"}
    ),
    AlertCase("PdserveNoProxy", 8, {f"up{{{AT_PROXY}}}": "0x20", f"up{{{AT_OTHER_PROXY}}}": "1x20"}),
    AlertCase(
        "PdserveNoDecodeNode",
        8,
        {
            nodes(AT_PROXY, "decode"): "2x4 0x20",
            nodes(AT_PROXY, "mixed"): "0x20",
            nodes(AT_PROXY, "prefill"): "2x20",
            nodes(AT_OTHER_PROXY, "decode"): "2x20",
        },
        NAMESPACE,
    ),
    AlertCase("PdserveNoDecodeNode", 8, {nodes(AT_PROXY, "decode"): "0x20", nodes(AT_PROXY, "mixed"): "1x20"}),
    AlertCase(
        "PdserveNoPrefillNode",
        8,
        {nodes(AT_PROXY, "decode"): "2x20", nodes(AT_PROXY, "mixed"): "0x20", nodes(AT_PROXY, "prefill"): "0x20"},
        NAMESPACE,
    ),
    AlertCase("PdserveNoPrefillNode", 8, {nodes(AT_PROXY, "prefill"): "1x20", nodes(AT_PROXY, "mixed"): "0x20"}),
    AlertCase(
        "PdserveNodesUnpaired",
        14,
        {UNPAIRED: "0x2 1x20", nodes(AT_PROXY, "prefill"): "1x30"},
        {**NAMESPACE, "role": "decode"},
        value="1",
    ),
    AlertCase("PdserveNodesUnpaired", 14, {UNPAIRED: "0x2 1x8 0x20", nodes(AT_PROXY, "prefill"): "1x30"}),
    AlertCase("PdserveNodesUnpaired", 14, {UNPAIRED: "1x30", nodes(AT_PROXY, "prefill"): "0x30"}),
    AlertCase(
        "PdserveProxiesDiffer",
        8,
        {nodes(AT_PROXY, "decode"): "2x20", nodes(AT_OTHER_PROXY, "decode"): "1x20"},
        {**NAMESPACE, "role": "decode"},
    ),
    AlertCase(
        "PdserveProxiesDiffer", 8, {nodes(AT_PROXY, "decode"): "2x20", nodes(AT_OTHER_PROXY, "decode"): "1x6 2x9"}
    ),
    AlertCase("PdserveNotScraped", 8, {f"up{{{AT_DECODE}}}": "1x4 0x20"}, {**DECODE, "component": "decode"}),
    AlertCase("PdserveNotScraped", 8, {f"up{{{AT_DECODE}}}": "1x6 0x20", 'up{job="other"}': "0x20"}),
    AlertCase("PdserveNotScraped", 8, proxies(one="1x4 0x40", live="2x5 1x40"), {**PROXY, "component": "proxy"}),
    AlertCase("PdserveNotScraped", 16, proxies(one="1x4 0x40", live="2x40")),
    AlertCase("PdserveNotScraped", 25, proxies(one="1x4 0x40", live="2x40"), {**PROXY, "component": "proxy"}),
    AlertCase("PdserveNotScraped", 8, {f"up{{{AT_PROXY}}}": "1x4 0x40"}, {**PROXY, "component": "proxy"}),
    AlertCase(
        "PdserveNodeRestarts",
        12,
        {
            f'process_start_time_seconds{{{AT_DECODE}, process="api"}}': "100x3 200x3 300x20",
            f'process_start_time_seconds{{{AT_DECODE}, process="engine"}}': "101x3 201x3 301x20",
        },
        DECODE,
        value="2",
    ),
    AlertCase(
        "PdserveNodeRestarts",
        12,
        {
            f'process_start_time_seconds{{{AT_DECODE}, process="api"}}': "100x3 200x20",
            f'process_start_time_seconds{{{AT_DECODE}, process="engine"}}': "101x3 201x20",
        },
    ),
    AlertCase(
        "PdserveNodeRestarts",
        12,
        {f'process_start_time_seconds{{{AT_DECODE}, process="grammars"}}': "100x3 200x3 300x3 400x20"},
    ),
    *event(
        "PdserveAuthenticationDrops",
        f'pdserve_proxy_discovery_frames_dropped_total{{{AT_PROXY}, reason="authentication"}}',
        PROXY,
    ),
    AlertCase(
        "PdserveAuthenticationDrops",
        6,
        {f'pdserve_proxy_discovery_frames_dropped_total{{{AT_PROXY}, reason="malformed"}}': "0x5 1x30"},
    ),
    AlertCase(
        "PdserveClockSkew", 8, {f"pdserve_proxy_clock_skew_seconds{{{AT_PROXY}}}": "0x3 30x20"}, PROXY, value="30"
    ),
    AlertCase(
        "PdserveClockSkew",
        8,
        {f"pdserve_kv_transfer_clock_skew_seconds{{{AT_DECODE}}}": "0x3 -30x20"},
        DECODE,
        value="30",
    ),
    AlertCase("PdserveClockSkew", 8, {f"pdserve_proxy_clock_skew_seconds{{{AT_PROXY}}}": "5x20"}),
    *event("PdserveFallbacks", f"pdserve_fallbacks_total{{{AT_DECODE}}}", DECODE),
    AlertCase("PdserveNoKvMoves", 30, prompts(in_vain="0+1x40", failed="0x40", remote="7x40"), DECODE),
    # After a failure only one prompt in five minutes is sent, as a probe.
    AlertCase("PdserveNoKvMoves", 30, prompts(in_vain="0x40", failed="0+2x40", remote="7x40"), DECODE),
    AlertCase("PdserveNoKvMoves", 30, prompts(in_vain="0+1x40", failed="0+2x40", remote="0+1x40")),
    AlertCase("PdserveNoKvMoves", 30, prompts(in_vain="0x20 1x20", failed="0x40", remote="7x40")),
    *event("PdserveLeasesExpired", f'pdserve_leases_expired_total{{{AT_DECODE}, direction="received"}}', DECODE),
    AlertCase("PdserveQuarantinedBlocks", 8, {BLOCKS: "0x4 4x20"}, DECODE, value="4"),
    AlertCase("PdserveQuarantinedBlocks", 8, {BLOCKS: "0x7 4x0 0x20"}),
    AlertCase("PdserveTcpFallback", 8, links("rc,tcp,self", tcp="0x4 3x20"), DECODE, value="3"),
    AlertCase("PdserveTcpFallback", 8, links("rc_x", tcp="0x4 3x20"), DECODE, value="3"),
    AlertCase("PdserveTcpFallback", 8, links("rc,tcp,self", tcp="0x20")),
    AlertCase("PdserveTcpFallback", 8, links("tcp,self,cuda_copy", tcp="3x20")),
    AlertCase("PdserveTcpFallback", 8, links("", tcp="3x20")),
    AlertCase("PdserveTcpFallback", 8, links("", tcp="3x20", ucx="1.21.0 system verbs"), DECODE, value="3"),
    AlertCase("PdserveTcpFallback", 8, links("tcp,self", tcp="3x20", ucx="1.21.0 system verbs")),
    AlertCase("PdserveKvNearlyFull", 12, {KV_USE: "0.5x4 0.97x20"}, DECODE, value="97%"),
    AlertCase("PdserveKvNearlyFull", 12, {KV_USE: "0.97x8 0.5x2 0.97x20"}),
    AlertCase(
        "PdserveQueueTime",
        20,
        buckets("pdserve_request_queue_time_seconds", AT_DECODE, "0x30", "0+60x30"),
        {**NAMESPACE, "component": "decode"},
        value="9.5s",
    ),
    AlertCase("PdserveQueueTime", 20, buckets("pdserve_request_queue_time_seconds", AT_DECODE, "0+60x30", "0+60x30")),
    AlertCase(
        "PdserveQueueTime",
        20,
        {'pdserve_prompt_queue_seconds{namespace="pdserve", pod="p0", component="prefill"}': "60x30"},
        {**NAMESPACE, "component": "prefill"},
        value="1m 0s",
    ),
    AlertCase(
        "PdserveQueueTime",
        20,
        {'pdserve_prompt_queue_seconds{namespace="pdserve", pod="p0", component="prefill"}': "2x30"},
    ),
    AlertCase(
        "PdserveFirstTokensLate",
        20,
        buckets(FIRST_TOKENS, AT_DECODE, "0x30", "0+60x30"),
        NAMESPACE,
        value="9.5s",
    ),
    AlertCase("PdserveFirstTokensLate", 20, buckets(FIRST_TOKENS, AT_DECODE, "0+57x30", "0+60x30")),
    AlertCase(
        "PdserveStepsLate",
        20,
        {
            f"pdserve_shared_steps_late_total{{{AT_DECODE}}}": "0+30x30",
            f"pdserve_shared_steps_total{{{AT_DECODE}}}": "0+60x30",
        },
        DECODE,
        value="50%",
    ),
    AlertCase(
        "PdserveStepsLate",
        20,
        {
            f"pdserve_shared_steps_late_total{{{AT_DECODE}}}": "0+6x30",
            f"pdserve_shared_steps_total{{{AT_DECODE}}}": "0+60x30",
        },
    ),
    AlertCase(
        "PdserveStepsLate",
        20,
        {
            f"pdserve_shared_steps_late_total{{{AT_DECODE}}}": "0x30",
            f"pdserve_shared_steps_total{{{AT_DECODE}}}": "0x30",
        },
    ),
    *event(
        "PdserveResumesFail",
        f'pdserve_proxy_resumes_total{{{AT_PROXY}, outcome="no_node"}}',
        {**PROXY, "outcome": "no_node"},
    ),
    AlertCase("PdserveResumesFail", 6, {f'pdserve_proxy_resumes_total{{{AT_PROXY}, outcome="resumed"}}': "0x5 1x30"}),
    AlertCase(
        "PdserveRequestsFail",
        20,
        {
            f'pdserve_proxy_requests_total{{{AT_PROXY}, status="503"}}': "0+6x30",
            f'pdserve_proxy_requests_total{{{AT_PROXY}, status="200"}}': "0+54x30",
        },
        NAMESPACE,
        value="10%",
    ),
    AlertCase("PdserveRequestsFail", 20, broken("upstream_lost"), NAMESPACE, value="10%"),
    AlertCase("PdserveRequestsFail", 20, broken("timed_out"), NAMESPACE, value="10%"),
    AlertCase("PdserveRequestsFail", 20, broken("client_gone")),
    AlertCase(
        "PdserveRequestsFail",
        20,
        {
            f'pdserve_proxy_requests_total{{{AT_PROXY}, status="404"}}': "0+6x30",
            f'pdserve_proxy_requests_total{{{AT_PROXY}, status="200"}}': "0+54x30",
        },
    ),
]


def waited(labels: str, seconds: str, requests: str) -> dict[str, str]:
    name = "pdserve_request_queue_time_seconds"
    return {f"{name}_sum{{{labels}}}": seconds, f"{name}_count{{{labels}}}": requests}


AT_PREFILL = 'namespace="pdserve", pod="pdserve-prefill-0", component="prefill"'
AT_OTHER_PREFILL = 'namespace="pdserve", pod="pdserve-prefill-1", component="prefill"'
ELSEWHERE = 'namespace="other", pod="pdserve-prefill-0", component="prefill"'
QUEUE = "pdserve_prompt_queue_seconds"
TRIGGERS = [
    TriggerCase(
        "pdserve-prefill",
        0,
        {
            f"{QUEUE}{{{AT_PREFILL}}}": "3x20",
            f"{QUEUE}{{{AT_OTHER_PREFILL}}}": "1x20",
            f"{QUEUE}{{{ELSEWHERE}}}": "9x20",
        },
        2,
    ),
    TriggerCase("pdserve-decode", 0, waited(AT_DECODE, "0+120x20", "0+60x20"), 2),
    TriggerCase("pdserve-decode", 0, waited(AT_DECODE, "7x20", "3x20"), 0),
    TriggerCase("pdserve-decode", 1, {KV_USE: "0.5x20"}, 0.5),
]
