"""Turns logits into tokens.

``sampling_row`` holds what one token depends on; ``logit_rules`` applies penalties and bans, by what ``token_counts``
has counted; ``drawing`` draws; ``sampler`` does all of this in turn; ``pending_tokens`` are read later than sampled.
"""
