"""Answers that are partly free and partly bound, as clients of vLLM and SGLang describe them (``structural_tag``)."""
