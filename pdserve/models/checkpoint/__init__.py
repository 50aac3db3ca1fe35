"""Reads a model folder or a GGUF file.

``demo`` finds the folder or file, ``decoder_config`` reads the model's shape, and ``weights`` and ``gguf_tensors``
read its tensors. ``family_settings`` knows the settings of each family, ``gguf_config`` those in a GGUF file, and
``fallback_config`` asks transformers for all other families', and ``quantisation`` refuses weights whose method nobody
knows. ``gguf_file`` reads the header of a GGUF file.
"""
