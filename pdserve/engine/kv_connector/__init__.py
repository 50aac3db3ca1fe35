"""The engine's side of KV transfer: the only package of the engine that knows ``pdserve_kvtransfer``.

A connector knows which transfers may still touch a request's blocks. ``release`` is called once for a request's
blocks, whatever ended it; they return to the pool only when no transfer can write to them or read from them any more.

``connector`` is what the step loop sees, and contains the parts: ``prompt_fetcher`` and ``prompt_pusher`` move prompts,
``cached_blocks`` moves what prefix caches have, and ``kv_return`` brings the blocks of answers back. All parts move
blocks through ``transfers``, in ``transfer_memory``, and through ``staging`` if transfers do not reach the cache
itself. ``opening`` puts a node's connector together, and the transfer of its other ranks.
"""

from pdserve.engine.kv_connector.connector import KvConnector
from pdserve.engine.kv_connector.opening import open_connector, ucx_label

__all__ = ["KvConnector", "open_connector", "ucx_label"]
