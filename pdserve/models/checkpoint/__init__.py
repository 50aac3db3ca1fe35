"""Reads a model folder or a GGUF file.

``model_files`` finds the folder or file, and says which files of a folder are the model's. ``config_reading`` reads the
model's ``decoder_config``: by the settings of a family that has a recipe, from the header of a ``gguf`` file,
or as a ``fallback_config``, for which it asks transformers. ``weights`` reads the tensors: those of folders through
``safetensors``, others through ``gguf``. ``weight_form`` says how large they are, and ``weight_file`` maps files and
shares packed weights. ``fingerprint`` says which models are the same. ``cached_tokenizer`` and others find
in ``cached_files`` what they have made before.
"""
