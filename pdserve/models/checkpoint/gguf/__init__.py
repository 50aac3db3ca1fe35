"""Reads models from GGUF files.

``file`` reads the header. ``settings`` makes a family's settings and recipe of it, by the tables of ``architectures``,
and ``tensors`` reads the weights. ``states`` has what both need to know of layers with a state, and ``latents`` of
latent attention.
"""
