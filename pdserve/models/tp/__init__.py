"""Spreads one model over the ranks of a node.

``shares`` says which part each rank holds and what a group of ranks does. ``tp_groups`` has the groups and opens one:
in shared memory (over a ``rank_board``) or by gloo on CPUs, and by NCCL on GPUs.
"""
