"""The API process of a node.

Its life is in node; a request comes in at routes, becomes prompts and sampling parameters in requests, goes to the
engine through generation, and comes back as text, chunks and events in answers.
"""
