"""The ops as Triton kernels, for GPUs. Triton's interpreter (``TRITON_INTERPRET=1``) runs the same code on a CPU."""
