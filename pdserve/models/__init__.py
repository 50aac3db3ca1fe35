"""Computes a model: turns the rows of one scheduled step into logits.

``checkpoint`` reads a model's shape and weights, ``families`` make a recipe of the shape, and ``decoder`` builds the
recipe's ``parts``. ``tp`` spreads a model over ranks, ``backend`` chooses the device and its kernels, and ``runner``
computes steps.
"""
