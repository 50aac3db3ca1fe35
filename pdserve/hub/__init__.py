"""Finds a model by its name: on this machine, in the cache of Hugging Face models, or on the hub, which gives it.

``names`` says which names mean the hub, ``cache`` knows the folder that all programs of Hugging Face share, and
``finding`` is the way in. What needs the network runs in a process of its own (``preparing``), so that a node
does not keep the hub's library in memory, and can answer how far the download is.
"""
