"""The engine's side of KV transfer: the only package of the engine that knows ``pdserve_kvtransfer``.

A connector knows which transfers may still touch a request's blocks. ``release`` is called once for a request's
blocks, whatever ended it; they return to the pool only when no transfer can write to them or read from them any more.

``connector`` is what the step loop sees, ``fetching_connector`` a decode node's and ``pushing_connector`` a prefill
node's; both move blocks through ``transfers``, in ``transfer_memory``, by way of ``staging`` where the cache itself is
not reached. ``opening`` puts a node's connector together, and ``tp_rank_transfer`` is the part of another rank.
"""

from pdserve.engine.kv_connector.connector import KvConnector
from pdserve.engine.kv_connector.opening import open_connector

__all__ = ["KvConnector", "open_connector"]
