"""Passes KV blocks through host memory where transfers do not reach the cache itself.

``block_copier`` copies between that memory and the cache. ``staged_transfers`` stands before the transfer thread, and
says which transfer may have how much of that memory.
"""
