"""Takes a client's request in: the request over ASGI, the bound on bodies that are held, what is read of a body, and
the queue for a place.
"""
