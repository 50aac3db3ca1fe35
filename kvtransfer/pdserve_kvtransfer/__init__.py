"""KV cache transfer between two engines.

``thread`` is what an engine uses; it gives orders to it and gets ``events``. ``sides`` is what the two sides have in
common, ``fetch`` is the decode side, and ``push`` the prefill side; they talk over the ``control`` channel. ``ranks``
spreads a link over the TP ranks of a node, where ``rank_thread`` moves another rank's ``pieces`` of each block.
``transport`` is the contract for moving them, and ``ucx`` keeps it.
"""
