"""Speaks HTTP/1.1 to nodes: a connection, the pool of connections, and the queue in which idle ones expire."""
