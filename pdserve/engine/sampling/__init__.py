"""Turns logits into tokens.

``sampler`` samples the tokens of a step, each by its ``sampling_row``; ``token_choice`` chooses them: ``logit_rules``
applies penalties and bans, for which ``token_counts`` counts, and ``drawing`` draws. Of a grammar, ``grammar_opener``
makes a ``grammar_matcher``; where that leaves few tokens, ``few_tokens`` has their logits. ``pending_tokens`` holds
tokens that are read later than sampled.
"""
