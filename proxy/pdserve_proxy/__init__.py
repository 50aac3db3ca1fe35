"""The proxy: the only process that clients connect to.

A request comes in through ``relayed_routes`` and ``requests``, ``routing`` chooses its nodes out of what ``registry``
knows, ``relay`` makes the attempts over the connections of ``upstream``, and the response goes back the same way.
``workers`` lets several processes do all of it. Start reading with ``server``, which puts it together, or follow a
request from ``relayed_routes`` on.
"""
