"""Spreads one engine over several tensor-parallel ranks.

``tp_ranks`` is rank 0's hold on the other ranks, ``rank_channel`` connects them, ``rank_program`` is what each of the
others runs, and ``tp_runner`` computes a step on all of them.
"""
