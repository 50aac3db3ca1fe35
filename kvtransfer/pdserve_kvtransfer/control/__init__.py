"""The control channel between two engines: signed frames over ZMQ, apart from the link that carries the blocks.

``sockets`` has its two ends and opens frames. ``handshake`` settles whether two engines fit.
"""
