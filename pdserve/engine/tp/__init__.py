"""Spreads one engine over several tensor-parallel ranks.

``tp_ranks`` is rank 0's side: it starts, watches and ends the other ranks, and computes a step on all of them.
``rank_channel`` connects them, and ``rank_program`` is what each of the others runs.
"""
