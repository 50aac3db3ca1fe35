"""Turns logits into tokens.

``sampler`` samples the tokens of a step, each by its ``sampling_row``: ``logit_rules`` applies penalties and bans, and
``token_choice`` chooses the best token or draws one by temperature and ``filters``. Of a grammar, ``grammar_opener``
makes a ``grammar_matcher``, which ``sampler`` asks. ``pending_tokens`` holds tokens that are read later than sampled,
and ``logprobs`` reports of them and of prompts.
"""
