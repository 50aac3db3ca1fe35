"""Says whether nodes with these settings return the KV blocks of answers."""

from __future__ import annotations

from pdserve.config import CacheConfig, KvReturn, Switch, TransferConfig
from pdserve.doctor.finding import Finding, ok, problem, warning

_CHECK = "KV return"


def check_kv_return(transfer: TransferConfig, cache: CacheConfig) -> Finding:
    if transfer.kv_return is KvReturn.OFF:
        return ok(_CHECK, "off: a node that goes on with an answer replays its tokens")
    if cache.prefix_cache is Switch.ON:
        return ok(_CHECK, "on: prefill nodes keep the KV blocks of answers in their prefix caches")
    if transfer.kv_return is KvReturn.ON:
        return problem(_CHECK, "it is on, and the prefix cache is off: nodes do not start", "set --prefix-cache on")
    return warning(_CHECK, "off, because the prefix cache is off", "set --prefix-cache on")
