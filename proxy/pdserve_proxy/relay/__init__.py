"""Sends a request to a decode node and its response to the client: the relayed request from its arrival to its end, the
relay that makes attempts, the stream of events, and what is counted and logged in the end.
"""
