"""Knows the nodes: the socket where they register, the registry with its mirror in worker processes, and the snapshot
that routes are made of.
"""
