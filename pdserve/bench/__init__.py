"""``pdserve bench`` measures the machine, the engine, and whole servers, as tables and JSON.

The benchmarks are ``engine``, ``transfer`` and ``load``. Each takes its settings and returns a ``report``, with the
``machine`` in it, which the command line prints and writes; two reports can be compared. ``load`` is the client that
puts load on servers, and ``streamed_answer`` measures what it gets. ``plan`` measures the profile of a machine for
``pdserve plan``, with the nodes that ``cluster`` starts.
"""
