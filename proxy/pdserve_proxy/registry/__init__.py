"""Knows the nodes: the socket where they register, the registry with its mirror in worker processes, and the snapshot
from which the router chooses.
"""
