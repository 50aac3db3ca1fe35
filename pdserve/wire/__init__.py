"""Has every message that crosses a process boundary, typed, as MessagePack.

In the order in which a request meets them: ``discovery`` (node ↔ proxy), ``proxy_workers`` (a proxy's supervisor ↔ its
workers), ``ticket`` (proxy → node over HTTP), with the request's ``terms``, ``journal`` (node → proxy, beside the
events of a streamed answer), ``engine`` (API process ↔ engine process, with ``sampling_params`` and ``grammar``),
``rank`` (rank 0 ↔ the other ranks), ``transfer`` (decode engine ↔ prefill engine) and ``rank_transfer`` (their ranks).
``frame`` authenticates messages between hosts, ``connection_guard`` bounds what strangers cost, ``ids`` names things,
and ``version`` lets hosts of neighbouring versions work together.
"""
