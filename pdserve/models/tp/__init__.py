"""Spreads one model over the ranks of a node.

``shares`` says which part each rank holds and what a group of ranks does. ``tp_opening`` opens a group:
``shared_memory_group`` (over a ``rank_board``) on CPUs, or ``torch_group``: gloo on CPUs, and NCCL on GPUs.
"""
