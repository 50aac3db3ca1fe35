"""Decides which nodes serve a request: the attempts under way at each node, the policies that choose among nodes, and
the router that applies one to a snapshot of the registry.
"""
