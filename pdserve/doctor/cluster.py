"""Checks which nodes a proxy knows, and whether they can be paired."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence

import msgspec

from pdserve.doctor.finding import Finding, ok, problem, warning
from pdserve.http.tls import Trust
from pdserve.wire.discovery import Role

_MAX_BODY_BYTES = 8 * 2**20


class ListedInstance(msgspec.Struct, frozen=True):
    """The part of an entry of the proxy's ``/instances`` that the doctor and commands read."""

    name: str
    role: str
    state: str
    control: str
    model: str
    fingerprint: str
    heartbeat_age_s: float
    url: str = ""
    boot_id: str = ""


def direct_opener(trust: Trust) -> urllib.request.OpenerDirector:
    """Returns an opener of URLs that does not use the environment's HTTP proxies.

    The requests of the doctor and of commands have to go to the addresses as they are written.
    """
    https = urllib.request.HTTPSHandler(context=trust.context)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), https)


def read_instances(proxy_url: str, timeout_s: float, trust: Trust | None = None) -> list[ListedInstance] | str:
    """Returns the registered nodes, or why they are unknown. Without ``trust``, the system's authorities count."""
    url = f"{proxy_url.rstrip('/')}/instances"
    try:
        with direct_opener(trust or Trust()).open(url, timeout=timeout_s) as response:
            return msgspec.json.decode(response.read(_MAX_BODY_BYTES), type=list[ListedInstance])
    except urllib.error.URLError as exc:
        return str(exc.reason)
    except (OSError, ValueError, msgspec.MsgspecError) as exc:
        return str(exc)


def prefill_controls(instances: Sequence[ListedInstance]) -> list[str]:
    return [instance.control for instance in instances if _prefills(instance)]


def _prefills(instance: ListedInstance) -> bool:
    """Returns whether other nodes can have their prompts computed by this one."""
    return instance.role in (Role.PREFILL, Role.MIXED) and bool(instance.control)


def check_instances(proxy_url: str, found: list[ListedInstance] | str) -> list[Finding]:
    check = "proxy"
    if isinstance(found, str):
        advice = "see that pdserve proxy runs there, and --proxy-url"
        if "CERTIFICATE_VERIFY_FAILED" in found:
            advice = "give --tls-ca the PEM file of the authority that made the proxy's certificate"
        return [problem(check, f"{proxy_url}: {found}", advice)]
    if not found:
        advice = f"give nodes --proxy with the control address of the proxy (its log names it), not {proxy_url}"
        return [problem(check, f"{proxy_url} knows no node", f"{advice}; all need the same secret")]
    counts = ", ".join(
        f"{sum(instance.role == role for instance in found)} {role}" for role in dict.fromkeys(i.role for i in found)
    )
    return [ok(check, f"{proxy_url} knows {counts}"), *_pairs(found), *_states(found)]


def _pairs(found: Sequence[ListedInstance]) -> list[Finding]:
    """Reports decode nodes for which no prefill or mixed node computes the same model."""
    prefill = [instance for instance in found if _prefills(instance)]
    decoding = [instance for instance in found if instance.role == Role.DECODE]
    if not decoding:
        return []
    findings = []
    for decode in decoding:
        if any((p.model, p.fingerprint) == (decode.model, decode.fingerprint) for p in prefill):
            continue
        others = sorted({f"{p.name} has {p.model} {p.fingerprint[:12]}" for p in prefill}) or [
            "there is no prefill node"
        ]
        findings.append(
            problem(
                f"pair for {decode.name}",
                f"it has {decode.model} {decode.fingerprint[:12]}; {'; '.join(others)}",
                "start a prefill node with the same --model, in the same form, and the same --served-model-name; a "
                "name of the hub means the revision that a host has: 'pdserve pull' on each gets the newest",
            )
        )
    return findings or [ok("pairs", "every decode node has a prefill node of the same model")]


def _states(found: Sequence[ListedInstance]) -> list[Finding]:
    odd = [f"{i.name} is {i.state}, last heard {i.heartbeat_age_s:.1f} s ago" for i in found if i.state != "serving"]
    return [warning("states", "; ".join(odd), "see the logs of these nodes")] if odd else []
