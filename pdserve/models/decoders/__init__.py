"""Computes hidden states and logits of token ids.

``decoder`` chooses a model's decoder: a family made of ``layers`` (``llama``, ``qwen3_moe``, ``gemma3``), or
``hf_decoder``, which leaves the layers to transformers and which ``hf_check`` tries out first.
"""
