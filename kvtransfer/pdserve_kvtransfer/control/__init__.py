"""The control channel between two engines: signed frames over ZMQ, beside the link that carries the blocks.

``sockets`` are its two ends and the opening of frames; ``handshake`` settles whether two engines fit; ``lease`` says
by the clock who still lives.
"""
