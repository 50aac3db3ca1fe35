"""Tensor parallelism: which part of a model a rank holds, and the groups in which ranks add up what they computed."""
