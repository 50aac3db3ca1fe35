"""Computes the operations that a step is made of.

``kv_layout`` says where keys and values lie, ``host_copies`` brings a step's numbers to the device, ``contract`` is
what every set of kernels offers, and ``cpu`` and ``triton`` are the sets. ``reference`` says in plain torch what each
operation means, and every other form is tested against it.
"""
