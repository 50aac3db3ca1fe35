"""Compiles grammars for one model's vocabulary: ``compiling``, on llguidance, after a ``trial`` in another process."""
