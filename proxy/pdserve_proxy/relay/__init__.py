"""Sends a request to a decode node and its response to the client.

``relay`` makes the attempts, each of which ``dispatch`` sends, and ``relayed_request`` holds a request's state from its
arrival to its end. ``event_stream`` passes a stream on in complete events; ``complete_answer`` reads an answer that
is not streamed.
"""
