"""Computes a model: turns the rows of one scheduled step into logits.

``checkpoint`` reads a model's shape and weights, ``decoders`` builds the model from them, ``tp`` spreads it over ranks,
``backend`` chooses the device and its kernels, and ``runner`` computes steps.
"""
