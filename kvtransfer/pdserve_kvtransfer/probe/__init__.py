"""Probes, with which ``pdserve doctor`` examines a prefill engine and measures a link to it without KV memory.

The doctor uses ``examiner``. ``asker`` measures at the doctor's end of the probe's link, and ``host`` is the prefill
engine's end.
"""
