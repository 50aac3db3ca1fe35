"""One node's engine: a step loop over a continuous batch, with its KV cache in blocks.

Read in this order: ``request``, ``block_manager``, ``scheduler``, ``sampler``, ``kv_connector``, ``step_loop``.
"""
