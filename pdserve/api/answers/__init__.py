"""From the engine's tokens to the bytes that a client gets: text (detokenizer, stop strings), log probabilities, the
form of each route, chunks and server-sent events, and the answer, whole or streamed.
"""
