"""The prefill side of transfers: KV blocks are pushed to the decode engines that asked for them.

``side`` drives all of it; ``peer`` is one decode engine; ``session`` is the protocol of one transfer, without I/O;
``port`` is one rank's end of the link, which posts that rank's heads of each block.
``pdserve_kvtransfer.fetch`` has the same four modules for the other side.
"""
