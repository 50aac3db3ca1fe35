"""Reads a model folder or a GGUF file.

``demo`` finds or makes the folder, ``decoder_config`` and ``gguf_config`` read the model's shape, and ``weights`` and
``gguf_tensors`` read its tensors. ``gguf_file`` reads the header of a GGUF file for both.
"""
