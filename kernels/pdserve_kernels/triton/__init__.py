"""Has the kernel set for GPUs, in Triton.

``triton_kernels`` is the set: it plans a step with ``attention_plan`` and launches the kernels of ``token_ops``,
``cache_ops`` and ``paged_attention``. Triton's interpreter (``TRITON_INTERPRET=1``) runs the same code on a CPU.
"""
