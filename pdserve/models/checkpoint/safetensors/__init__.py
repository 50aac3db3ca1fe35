"""Reads weights from the safetensors files of a Hugging Face folder.

``files`` hands out tensors by their names, and ``header`` says where they lie. ``quantisation`` says how weights are
quantised, by the folder's configuration, ``quantised_tensors`` finds the tensors that are one weight, and
``dequantising`` reads them. Only ``files`` and ``dequantising`` load torch.
"""
