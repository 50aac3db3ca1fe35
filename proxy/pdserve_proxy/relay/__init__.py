"""Sends a request to a decode node and its response to the client.

``relay`` makes the attempts, each of which ``dispatch`` sends, and ``relayed_request`` holds a request's state from its
arrival to its end. ``event_stream`` passes a stream on in ``whole_events``, and keeps its ``journal``, from which
``resume`` has another node go on with it. ``access_log`` counts and logs the request in the end.
"""
