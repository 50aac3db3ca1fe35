"""Runs one node's engine: a step loop over a continuous batch, with its KV cache in blocks.

Read in this order: ``request``, ``scheduling``, ``kv_cache``, ``launched_step``, ``sampling``, ``kv_connector``,
``step_loop``. ``process`` and ``assembly`` start it all; ``tp`` spreads it over several ranks.
"""
