"""The only thing that clients see: knows the nodes (``registry``), picks a route (``policies``), relays (``relay``).

Start with ``server``, which puts it together, or follow a request from ``app`` on.
"""
