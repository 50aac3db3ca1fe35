"""Every message that crosses a process boundary, typed, as MessagePack.

``frame`` authenticates, ``ids`` names things, ``discovery`` is node ↔ proxy, ``proxy_workers`` is a proxy's supervisor
↔ its workers, ``ticket`` is proxy → node over HTTP, ``engine`` is API process ↔ engine process, ``transfer`` is decode
engine ↔ prefill engine, ``rank`` and ``rank_transfer`` are rank 0 of an engine ↔ its other tensor-parallel ranks.
"""
