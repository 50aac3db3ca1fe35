"""KV cache transfer between two engines.

Every engine can fetch from any other and be fetched from. Within one transfer, the engine that fetches is the *decode
engine* and the one that computes the prompt and pushes its blocks is the *prefill engine*, whatever their nodes' roles.

An engine uses ``thread``: it gives orders to the thread and gets ``events`` from it. ``configuration`` makes the
thread's settings and its transport of the engine's settings. ``sides`` has what both sides have in common, ``fetch`` is
the decode side, ``push`` is the prefill side, and ``thread`` puts them together. The two sides talk over the
``control`` channel. ``ranks`` spreads a link over the TP ranks of a node, and ``rank_thread`` moves another rank's
``pieces`` of each block; ``pieces`` defines the words for all that travels. ``transport`` is the contract for moving
pieces, and ``ucx`` implements it. ``probe`` serves ``pdserve doctor``.
"""
