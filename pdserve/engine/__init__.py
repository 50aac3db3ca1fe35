"""Runs one node's engine: a step loop over a continuous batch, with its KV cache in blocks.

A reader may take the modules in this order: ``request``, ``step_loop``, ``scheduling``, ``kv_cache``,
``launched_step``, ``sampling``, ``placement``, ``kv_connector``. ``process`` and ``assembly`` start the engine, and
``tp`` spreads it over several ranks.
"""
