"""The engine's side of KV transfer: the only package of the engine that knows ``pdserve_kvtransfer``.

A connector owns the question of who may still touch a request's blocks. ``release`` is called once for a request's
blocks, whatever ended it; they return to the pool only when no transfer can write to them or read from them any more.
"""

from pdserve.engine.kv_connector.contract import KvConnector
from pdserve.engine.kv_connector.opening import open_connector

__all__ = ["KvConnector", "open_connector"]
