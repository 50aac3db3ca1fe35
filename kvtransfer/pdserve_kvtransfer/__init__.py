"""KV cache transfer between two engines.

An engine uses ``thread``: it gives orders to the thread and gets ``events`` from it. ``configuration`` makes the
thread's settings and its transport of the engine's settings. ``sides`` has what both sides have in common, ``fetch`` is
the decode side, and ``push`` is the prefill side. The two sides talk over the ``control`` channel. ``ranks`` spreads a
link over the TP ranks of a node, and ``rank_thread`` moves another rank's ``pieces`` of each block; ``pieces`` defines
the words for all that travels. ``transport`` is the contract for moving pieces, and ``ucx`` implements it. ``probe``
serves ``pdserve doctor``.
"""
