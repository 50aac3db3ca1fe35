"""The decode side of transfers: KV blocks are fetched from prefill engines.

``side`` drives all of it; ``peer`` is one prefill engine; ``session`` is the protocol of one transfer, without I/O;
``port`` is one rank's end of the link, which decides which arrivals may land, and where.
``pdserve_kvtransfer.push.session`` has the same four modules for the other side.
"""
