"""Turns logits into tokens.

``sampler`` samples the tokens of a step, each by its ``sampling_row``; ``token_choice`` chooses them: ``logit_rules``
applies penalties and bans, for which ``token_counts`` counts, and ``drawing`` draws by temperature and ``filters``. Of
a grammar, ``grammar_opener`` makes a ``grammar_matcher``, which ``grammar_step`` asks. ``pending_tokens`` holds tokens
that are read later than sampled, and ``logprobs`` reports of them and of prompts.
"""
