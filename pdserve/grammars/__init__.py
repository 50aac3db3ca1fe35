"""Compiles grammars for one model's vocabulary: ``vocabulary`` and ``compiling``, on llguidance."""
