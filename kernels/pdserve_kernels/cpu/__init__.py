"""Has two kernel sets for CPUs.

``compiled_kernels`` is C++ (``csrc``, which ``library`` compiles and ``compiled_attention`` plans for), whose loops
run on lent cores, too. ``torch_kernels`` is plain torch, for a machine without a compiler.
"""
