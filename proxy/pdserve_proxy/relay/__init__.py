"""Sends a request to a decode node and its response to the client.

``relay`` makes the attempts, ``relayed_request`` holds a request's state from its arrival to its end, ``event_stream``
passes a stream on, and ``access_log`` counts and logs the request in the end.
"""
