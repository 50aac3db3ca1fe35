"""The API process of a node.

Its life is in server; a request comes in at app and completions, becomes prompts and sampling parameters in
requests, goes to the engine through engine_client, and comes back as text, chunks and events in answers.
registration keeps the node known to its proxies.
"""
