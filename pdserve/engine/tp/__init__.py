"""Spreads one engine over several tensor-parallel ranks.

``tp_ranks`` starts, watches and ends the other ranks for rank 0, ``rank_channel`` connects them, ``rank_program`` is
what each of the others runs, and ``tp_runner`` computes a step on all of them.
"""
