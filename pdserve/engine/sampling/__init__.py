"""Turns logits into tokens.

``sampler`` samples the tokens of a step, each by its ``sampling_row``: ``logit_rules`` applies penalties and bans, for
which ``token_counts`` counts, and ``drawing`` draws. ``pending_tokens`` holds tokens that are read later than sampled.
"""
