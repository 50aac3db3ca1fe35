"""``pdserve bench`` measures the machine, the engine, and whole servers, as tables, JSON and plots.

``programs`` starts servers, ``load`` and ``client_process`` put load on them, and ``streamed_answer`` and
``process_usage`` measure. The benchmarks are ``engine``, ``transfer``, ``stream``, ``proxy`` and ``batching``. Each
takes its settings and returns a ``report``, with the ``machine`` in it, which the command line prints and keeps, and
``compare`` compares two reports.
"""
