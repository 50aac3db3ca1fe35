"""Keeps the blocks of the KV cache.

``block_tables`` fills each request's block table, ``block_manager`` is the pool that the blocks come from, and
``prefix_cache`` finds blocks again by their hash.
"""
