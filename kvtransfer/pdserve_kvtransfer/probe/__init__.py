"""Probes, with which ``pdserve doctor`` examines a prefill engine and measures a link to it without KV memory.

The doctor uses ``examiner``, and ``host`` is the prefill engine's end.
"""
