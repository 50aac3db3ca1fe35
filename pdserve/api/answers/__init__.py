"""Turns the engine's tokens into the bytes that a client gets: text (detokenizer, stop strings), log probabilities, the
form of each route, chunks and server-sent events, and the answer, complete or streamed.
"""
