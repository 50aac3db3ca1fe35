"""Blocks over UCX, the transport of production.

``ucx_transport`` makes links. A link's ``poster`` posts its messages, either in compiled code
(``compiled_poster``, with ``csrc``) or through ucxx's Python objects (``ucxx_poster``). ``ucx_library`` loads UCX.
"""
