"""Passes KV blocks through host memory where transfers do not reach the cache itself.

``staging_blocks`` says which transfer may have how much of that memory, ``block_copier`` copies between it and the
cache, and ``staged_transfers`` stands before the transfer thread.
"""
