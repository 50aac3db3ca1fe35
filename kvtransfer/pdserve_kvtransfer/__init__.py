"""KV cache transfer between two engines.

``thread`` is what an engine uses. Below it: ``decode`` and ``prefill`` drive one side each; ``fetch``, ``push``,
``handshake`` and ``lease`` are the protocol without I/O; ``control`` is ZMQ; ``transport`` is the contract for moving
blocks, with ``ucx`` for production and ``inproc`` for tests.
"""
